"""Pages of another process' GPU memory: checks of each copy, and which side closes what.

The GPU is tests/support/fake_cuda.py; other processes are real. For what all readers promise see test_kvtransfer.py.
"""

import asyncio
import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.cuda import pool as pool_module
from engine.cuda.gpu import GpuPages
from kvtransfer.cuda_ipc import CudaIpcReader, GpuMemory
from kvtransfer.memory_file import PeerFile
from kvtransfer.reader import Local, PageRef, PeerPages, ReadError
from protos import decode_pb2, decode_pb2_grpc, kv_pb2, worker_pb2
from runtime.lifecycle import spare_what_is_here
from tests.support.fake_cuda import FakeGpu, count_opened
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.pool_process import COMMAND, Exporter, build_local, build_pool, page_content
from tests.support.real_workers import (
    CHUNK_TOKENS,
    NUM_PAGES,
    PAGE_TOKENS,
    build_kv_engine,
    decode_worker,
    gateway,
    prefill_worker,
)
from wire.kv_layout import TEST_BYTES
from worker.peers import kv_peers

GPU_PROCESS = (*COMMAND, "fake-gpu")
PROMPT = [(number * 7) % 50 + 1 for number in range(23)]


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """`count_opened` collects garbage: this excludes what was loaded before these tests."""
    spare_what_is_here()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Exporter]:
    with Exporter(GPU_PROCESS, NUM_PAGES) as process:
        yield process


class Watched:
    """A reader's copies, and when it asks whether the peer is alive."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()  # threads that copied
        self.is_alive = True
        self.error: RuntimeError | None = None  # an error of CUDA
        self.after_copy: Callable[[], None] = lambda: None
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        copy = GpuPages.copy

        def copy_watched(pages: GpuPages, *what: Any) -> None:
            self.threads.add(threading.get_ident())
            self.has_begun.set()
            assert self.may_end.wait(PATIENCE_S)
            if self.error:
                raise self.error
            copy(pages, *what)
            self.events.append("copied")
            self.after_copy()

        def is_held(_file: PeerFile) -> bool:
            self.events.append("alive?")
            return self.is_alive

        patch.setattr(GpuPages, "copy", copy_watched)
        patch.setattr(PeerFile, "is_held", is_held)
        patch.setattr(pool_module.GpuPool, "end_if_lost", lambda _pool: self.events.append("lost?"))

    async def begin_read(self, opened: CudaIpcReader) -> asyncio.Task[None]:
        """A read whose copy has begun and is held."""
        self.may_end.clear()
        reading = asyncio.create_task(opened.read(REFS, INTO))
        await asyncio.to_thread(self.has_begun.wait, PATIENCE_S)
        return reading


REFS, INTO = [PageRef(5, 0), PageRef(8, 0)], [3, 4]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture
def local() -> Iterator[Local]:
    """Its thread, which remembers what it did last, ends with the test."""
    local = build_local(build_pool(5, FakeGpu()), "reader")
    yield local
    local.close()


async def test_generations_are_read_after_the_copy_of_another_thread(
    watched: Watched, lasting: Exporter, local: Local
) -> None:
    opened = await CudaIpcReader.open(local, lasting.peer)
    await opened.read(REFS, INTO)
    assert watched.events == ["alive?", "copied", "alive?"] and threading.get_ident() not in watched.threads
    watched.after_copy = lambda: lasting.recycle(7)
    with pytest.raises(ReadError, match="page 7 was recycled: offered at generation 0, now 1") as error:
        await opened.read([PageRef(7, 0)], [3])
    assert error.value.reason == "generation"
    await opened.close()


async def test_memory_of_a_dead_peer_is_neither_copied_nor_believed(
    watched: Watched, lasting: Exporter, local: Local
) -> None:
    opened = await CudaIpcReader.open(local, lasting.peer)
    reading = await watched.begin_read(opened)
    watched.is_alive = False
    watched.may_end.set()
    with pytest.raises(ReadError, match=f"process {lasting.peer.pid} is gone") as error:
        await reading
    assert error.value.reason == "transport" and watched.events == ["alive?", "copied", "alive?"]
    watched.events.clear()
    with pytest.raises(ReadError, match="is gone"):
        await opened.read(REFS, INTO)
    assert watched.events == ["alive?"] and opened.is_gone()
    await opened.close()


async def test_a_cancelled_read_and_a_close_end_after_the_copy_under_way(
    watched: Watched, lasting: Exporter, local: Local
) -> None:
    opened = await CudaIpcReader.open(local, lasting.peer)
    reading = await watched.begin_read(opened)
    reading.cancel()
    closing = asyncio.create_task(opened.close())
    done, _ = await asyncio.wait([reading, closing], timeout=0.05)
    assert not done
    watched.may_end.set()
    await asyncio.wait([reading, closing])
    assert reading.cancelled() and watched.events == ["alive?", "copied"] and closing.exception() is None


async def test_what_cuda_says_is_the_refusal(watched: Watched, lasting: Exporter, local: Local) -> None:
    opened = await CudaIpcReader.open(local, lasting.peer)
    watched.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(ReadError, match="illegal memory access") as error:
        await opened.read(REFS, INTO)
    assert error.value.reason == "transport" and watched.events.pop() == "lost?"
    await opened.close()


@pytest.mark.parametrize(
    ("error", "ends"),
    [(None, 0), ("CUDA error: an illegal memory access was encountered", 1), ("CUDA out of memory", 0)],
)
def test_a_process_whose_gpu_is_lost_ends_though_it_has_no_steps(
    error: str | None, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, ended = FakeGpu(), list[int]()
    store = build_pool(3, gpu)

    def fail(launch: Callable[[], object]) -> None:
        raise RuntimeError(error)

    if error:
        monkeypatch.setattr(gpu, "run", fail)
    monkeypatch.setattr(pool_module, "end_process", lambda: ended.append(1))
    store.end_if_lost()
    assert len(ended) == ends


def changed(peer: kv_pb2.Peer, **values: object) -> kv_pb2.Peer:
    copied = kv_pb2.Peer()
    copied.CopyFrom(peer)
    memory = gpu_of(peer)
    for field, value in values.items():
        if field in ("pid", "address"):  # of its only rank
            setattr(copied.ranks[0], field, value)
        if field in ("handle", "test_checksum"):
            memory = msgspec.structs.replace(memory, **{field: value})
        else:
            setattr(copied, field, value)
    copied.ranks[0].transports["cuda_ipc"] = memory.pack()
    return copied


def gpu_of(peer: kv_pb2.Peer) -> GpuMemory:
    memory = GpuMemory.read(peer.ranks[0], "cuda_ipc")
    assert memory
    return memory


@pytest.mark.parametrize(
    ("lie", "reason", "words"),
    [
        ({"handle": bytes(65)}, "transport", "an IPC handle has 64 bytes, not 65"),
        ({"handle": bytes(64)}, "transport", "cudaIpcOpenMemHandle: invalid resource handle"),
        ({"num_pages": NUM_PAGES + 400}, "transport", f"fewer than {(NUM_PAGES + 400) * 512 + TEST_BYTES} bytes"),
        ({"test_checksum": 0x1234}, "transport", "reads wrong here: its 65536 test bytes have checksum 00001234 there"),
        ({"num_pages": 2**32 - 1}, "layout", "leave no room"),
        ({"pages_offset": 8192}, "layout", "has 4096 bytes where 8192 were announced"),
        ({"pid": 2**32 - 1}, "transport", "cannot open"),
    ],
)
async def test_peers_that_lie_are_refused_and_nothing_stays_open(
    lie: dict[str, object], reason: str, words: str, lasting: Exporter, local: Local
) -> None:
    before = count_opened()
    with pytest.raises(ReadError, match=words) as error:
        await CudaIpcReader.open(local, changed(lasting.peer, **lie))
    assert error.value.reason == reason and count_opened() == before


def test_a_pool_is_closed_once_and_then_no_longer_read(lasting: Exporter) -> None:
    store = build_pool(3, FakeGpu())
    before = count_opened()
    pages = store.open_peer(gpu_of(lasting.peer).handle, NUM_PAGES, store.page_bytes)
    assert count_opened() == before + 1
    for _again in range(2):
        pages.close()
        assert count_opened() == before
    with pytest.raises(RuntimeError, match="closed before the copy"):
        pages.copy([0], [0])


async def test_an_opening_that_is_cancelled_is_closed(
    lasting: Exporter, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    pool = local.store
    open_peer = pool.open_peer

    def open_slowly(handle: bytes, num_pages: int, page_bytes: int) -> PeerPages:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)
        return open_peer(handle, num_pages, page_bytes)

    monkeypatch.setattr(pool, "open_peer", open_slowly)
    before = count_opened()
    opening = asyncio.create_task(CudaIpcReader.open(local, lasting.peer))
    await asyncio.to_thread(has_begun.wait, PATIENCE_S)
    opening.cancel()
    may_end.set()
    await asyncio.wait([opening])
    assert opening.cancelled() and count_opened() == before


async def shake_hands(stub: decode_pb2_grpc.DecodeStub, peer: kv_pb2.Peer) -> str:
    answer: decode_pb2.HandshakeResponse = await stub.Handshake(decode_pb2.HandshakeRequest(peer=peer))
    return answer.transport


async def test_offered_pages_are_read_from_the_gpu_of_another_process_until_it_dies(
    monkeypatch: pytest.MonkeyPatch, local: Local
) -> None:
    monkeypatch.setattr(kv_peers, "LOOK_S", 0.005)
    news, before = Signal(), count_opened()
    built = build_kv_engine(gpu=FakeGpu())
    with Exporter(GPU_PROCESS, NUM_PAGES) as exporter:
        peer = exporter.peer
        async with decode_worker(news, "cuda_ipc", built=built) as decode, gateway(decode, news) as opened:
            for _again in range(2):
                assert await shake_hands(opened.stub, peer) == "cuda_ipc"
            assert count_opened() == before + 2, "the peer's, mapped once, and our own"
            ticket = await opened.reserve(1, PROMPT)
            exporter.recycle(*range(6))
            refs = [kv_pb2.PageRef(page=page, generation=1) for page in (5, 3, 1, 0, 2, 4)]
            offer = kv_pb2.OfferRequest(ticket=ticket, incarnation="exporter", end=ticket.end, pages=refs)
            answer: kv_pb2.OfferResponse = await opened.stub.Offer(offer)
            assert answer.accepted and answer.bytes == 6 * decode.pool.page_bytes
            there = {bytes(row) for row in decode.pool.load(range(NUM_PAGES))}
            whole = [bytes(page_content(ref.page, 1, decode.pool.page_bytes)) for ref in refs[:-1]]
            assert there.issuperset(whole), "decode continues in the last one"
            moved = decode.metrics.registry.get_sample_value("baton:kv_transfer_bytes_total", {"transport": "cuda_ipc"})
            assert moved == answer.bytes and decode.peers.transports() == {peer.address: "cuda_ipc"}
            ours = await CudaIpcReader.open(local, peer)
            assert not ours.is_gone()
            os.kill(peer.pid, signal.SIGKILL)
            await asyncio.to_thread(os.waitid, os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
            assert await asyncio.to_thread(Path(f"/proc/{peer.pid}").exists) and ours.is_gone()
            with pytest.raises(ReadError, match="is gone"):
                await ours.read([PageRef(0, 0)], [0])
            await ours.close()
            del ours
            while decode.peers.transports() or count_opened() > before + 1:  # noqa: ASYNC110, no event for it
                await asyncio.sleep(0.005)
            await opened.abort(1)


async def test_auto_tells_why_gpu_memory_that_reads_wrong_is_not_read(lasting: Exporter) -> None:
    news = Signal()
    async with (
        prefill_worker(news) as prefill,
        decode_worker(news, "auto", built=build_kv_engine(gpu=FakeGpu())) as decode,
        gateway(decode, news) as opened,
    ):
        checksum = gpu_of(lasting.peer).test_checksum ^ 1
        peer = changed(lasting.peer, address=prefill.peer.address, test_checksum=checksum)  # which serves pages by gRPC
        peer.incarnation = prefill.peer.incarnation
        decode.peers._is_required = False  # as auto has it
        with capture_logs() as logs:
            assert await shake_hands(opened.stub, peer) == "grpc"
        warnings = [(it["asked"], it["used"], it["why"]) for it in logs if it["log_level"] == "warning"]
        status: worker_pb2.WorkerStatus = await opened.worker.Status(worker_pb2.StatusRequest())
        known, costs = decode.peers._known[peer.address], status.chunk_costs
        assert costs.tokens == CHUNK_TOKENS and costs.read_token_seconds == pytest.approx(
            decode.pool.page_bytes / PAGE_TOKENS / known.bytes_per_s
        )
        why = known.why
        assert warnings == [("cuda_ipc", "grpc", why)]
        assert re.match("cuda_ipc failed: the GPU memory of process .* reads wrong here: its .* have checksum", why)
