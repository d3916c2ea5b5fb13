"""GPU memory through real calls to a libcudart over host memory (tests/fake_cudart.cpp), and a pool on it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from engine.kv import gpu as gpu_module
from engine.kv.cuda_memory import IPC_HANDLE_BYTES, CudaError, DeviceBytes
from engine.kv.gpu import CudaGpu
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


def test_handles_that_open_nothing_are_refused(gpu: FakeGpu) -> None:
    memory = DeviceBytes(gpu.cudart, 4096)
    handle = gpu.cudart.export(memory.address)
    assert len(handle) == IPC_HANDLE_BYTES
    for wrong in (b"", handle[:-1], handle + b"\0"):
        with pytest.raises(CudaError, match=f"an IPC handle has 64 bytes, not {len(wrong)}"):
            gpu.cudart.open(wrong, 4096)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle: invalid resource handle"):
        gpu.cudart.open(bytes(64), 4096)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle: invalid device context"):
        gpu.cudart.open(handle, 4096)


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
        Pool(shape, torch.device("cpu"), gpu=gpu)


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


def test_a_pool_on_the_cpu_opens_no_gpu_memory() -> None:
    with pytest.raises(RuntimeError, match="not on a GPU"):
        build_pool(NUM_PAGES).open_peer(bytes(64), 1, 512)


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
        "Stream": lambda device: f"stream of {device}", "can_device_access_peer": lambda ours, theirs: theirs == 0,
        "get_device_properties": lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
    }  # fmt: skip
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(gpu_module, "find_cudart", fake_cudart)
    gpu = CudaGpu(torch.device("cuda"))
    assert (gpu.uuid, gpu.readable) == ("uuid-2", ("uuid-2", "uuid-0"))
    assert gpu.run(lambda: done.append("work")) is None
    assert done == ["stream of cuda:2", "work", "record", "leave", "wait"]
    with pytest.raises(CudaError, match="cudaSetDevice: invalid device ordinal"):  # the library has only one device
        gpu.cudart.allocate(1)
