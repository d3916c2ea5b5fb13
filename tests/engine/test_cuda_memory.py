"""GPU memory through real calls to a libcudart over host memory (tests/fake_cudart.cpp), and a pool on it."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cuda import gpu as gpu_module
from engine.cuda.cuda_memory import IPC_HANDLE_BYTES, CudaError, Span
from engine.cuda.gpu import Gpu, GpuPages
from engine.cuda.gpu_pages import copy_pages
from engine.cuda.pool import GpuPool
from engine.kv.pool import Pool, PoolShape
from tests.support.fake_cuda import FakeGpu, count_opened, fake_cudart
from tests.support.pool_process import build_pool
from wire.kv_layout import KvPart

NUM_PAGES = 5


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


def test_what_cuda_refuses_is_told_in_its_words_and_not_left_for_torch(gpu: FakeGpu) -> None:
    with pytest.raises(CudaError, match=r"^cudaMalloc: out of memory \(error 2\)$"):
        gpu.cudart.allocate(2 << 30)
    assert ctypes.CDLL(fake_cudart()).cudaGetLastError() == 0
    with pytest.raises(CudaError, match=r"^cudaFree: invalid argument \(error 1\)$"):
        gpu.cudart.free(4096)


def test_memory_is_freed_with_the_last_tensor_on_it(gpu: FakeGpu) -> None:
    before = count_opened()
    tensor = build_pool(NUM_PAGES, gpu).tensor  # as benches do: the pool itself is deleted
    assert count_opened() == before + 1
    tensor.fill_(1.0)
    del tensor
    assert count_opened() == before


def test_a_pool_on_a_gpu_begins_with_zeros_and_keeps_only_generations_in_its_file(gpu: FakeGpu) -> None:
    pool = build_pool(NUM_PAGES, gpu)
    assert not pool.tensor.any() and len(pool.ipc_handle) == IPC_HANDLE_BYTES and pool.why_private is None
    assert pool.fd is not None and os.fstat(pool.fd).st_size == pool.pages_offset
    pool.generations[3] = 7
    assert os.pread(pool.fd, 8, 3 * 8) == (7).to_bytes(8, "little")
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 8)


def test_a_pool_too_large_for_the_gpu_names_the_setting(gpu: FakeGpu) -> None:
    shape = PoolShape(1 << 20, (KvPart(32, 8, 128),), 16, torch.bfloat16)
    with pytest.raises(ValueError, match=r"2097152 MiB on the GPU \(cudaMalloc: out of memory.*lower --kv-memory-mib"):
        GpuPool(shape, gpu)


@pytest.mark.parametrize(("lacks", "why"), [("export", "cannot be exported: not supported"), ("file", "memfd_create")])
def test_a_pool_that_peers_cannot_open_says_why(
    lacks: str, why: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int) -> bytes:
        raise CudaError("not supported")

    if lacks == "export":
        monkeypatch.setattr(gpu.cudart, "export", refuse)
    else:
        monkeypatch.delattr(os, "memfd_create")
    pool = build_pool(NUM_PAGES, gpu)
    assert not pool.ipc_handle and pool.why_private is not None and why in pool.why_private
    pool.generations[0] += 1


@pytest.mark.parametrize("lends", [True, False])
def test_a_pool_without_shared_memory_is_private(lends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because the system has none, which is a weakness, or because nobody reads it."""
    whole = build_pool(NUM_PAGES)
    assert whole.fd is not None
    if lends:
        monkeypatch.delattr(os, "memfd_create")
    pool = Pool(whole.shape, lends=lends)
    row = np.random.default_rng(1).integers(0, 256, pool.page_bytes, np.uint8)
    pool.store([4], [row])
    assert pool.fd is None and np.array_equal(pool.load([0, 4]), [0 * row, row])
    assert (pool.why_private is not None) == lends


@pytest.mark.parametrize(("page_tokens", "by_kernel"), [(16, True), (2048, False)])
def test_large_pages_are_copied_by_a_copy_engine_and_small_ones_by_the_kernel(
    page_tokens: int, by_kernel: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = PoolShape(6, (KvPart(1, 1, 16),), page_tokens, torch.float32)  # 2 KiB or 256 KiB a page
    store = GpuPool(shape, gpu)
    landing = store.open_landing(4)
    assert isinstance(landing, GpuPages)
    content = np.random.default_rng(1).integers(0, 256, 4 * store.page_bytes, np.uint8)
    ctypes.memmove(landing.address, content.ctypes.data, content.nbytes)
    launched: list[str] = []
    copy_pages, copy_spans = gpu.copy_pages, gpu.copy_spans

    def note(name: str, copy: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: (launched.append(name), copy(*arguments))[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(gpu, "copy_pages", note("kernel", copy_pages))
    monkeypatch.setattr(gpu, "copy_spans", note("engine", copy_spans))
    landing.copy([3, 0, 1], [5, 1, 2])
    landing.copy([2], [0], store.page_bytes // 2, store.page_bytes // 4, store.page_bytes // 2)
    assert launched == ["kernel" if by_kernel else "engine"] * 2
    rows, part = content.reshape(4, -1), store.page_bytes // 4
    assert (store.load([5, 1, 2]) == rows[[3, 0, 1]]).all() and not store.load([3, 4]).any()
    assert (store.load([0], part, 2 * part)[0] == rows[2, 2 * part :]).all()
    landing.close()


def test_work_aside_from_the_engines_is_waited_for_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

    @contextmanager
    def stream(which: str) -> Iterator[None]:
        done.append(which)
        yield
        done.append("leave")

    doubles = {
        "current_device": lambda: 2, "device_count": lambda: 4, "Event": Event, "stream": stream,
        "current_stream": lambda device: SimpleNamespace(cuda_stream=77),
        "Stream": lambda device: f"stream of {device}", "can_device_access_peer": lambda ours, theirs: theirs == 0,
        "get_device_properties": lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
    }  # fmt: skip
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(gpu_module, "find_cudart", fake_cudart)
    gpu = Gpu(torch.device("cuda"))
    assert (gpu.uuid, gpu.readable) == ("uuid-2", ("uuid-2", "uuid-0"))
    assert gpu.run(lambda: done.append("work")) is None
    assert done == ["stream of cuda:2", "work", "record", "leave", "wait"]
    copied: list[object] = []
    monkeypatch.setattr(gpu.cudart, "copy", lambda *arguments: copied.extend(arguments))
    gpu.copy_spans([Span(1, 2, 3)])
    assert copied == [[(1, 2, 3)], 77], "on the current stream"
    with pytest.raises(CudaError, match="cudaSetDevice: invalid device ordinal"):  # the library has only one device
        gpu.cudart.allocate(1)


MAP_NORESERVE = 0x4000


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_pools_may_be_larger_than_32_bits_count() -> None:
    num_words, far = 1 << 17, 20_000  # the far page begins at word 2.6e9, byte 1e10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 12 << 30, flags=flags)
    pool = torch.from_numpy(np.frombuffer(memory, np.int32)).view(-1, num_words)
    pool[far] = torch.arange(num_words, dtype=torch.int32)
    copy_pages(pool.data_ptr(), num_words, pool, ids(far), ids(2))
    copy_pages(pool.data_ptr(), num_words, pool, ids(2), ids(far + 1))
    assert torch.equal(pool[2], pool[far]) and torch.equal(pool[far + 1], pool[far])


def test_pages_that_are_not_aligned_or_have_no_place_are_refused() -> None:
    pool = torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 pages cannot be copied into 1"):
        copy_pages(pool.data_ptr(), 8, pool, ids(0, 1), ids(1))
    with pytest.raises(ValueError, match="are not aligned to 16 bytes"):
        copy_pages(pool.data_ptr() + 4, 8, pool, ids(0), ids(1))
