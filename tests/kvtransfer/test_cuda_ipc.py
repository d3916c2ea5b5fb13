"""Pages of another process' GPU memory: checks of each copy, and which side closes what.

The GPU is tests/support/fake_cuda.py; other processes are real. For what all readers promise see test_kvtransfer.py.
"""

import asyncio
import gc
import os
import signal
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from decode_worker import kv_peers
from engine.kv import pool as pool_module
from engine.kv.pool import Pool
from kvtransfer import cuda_ipc
from kvtransfer.cuda_ipc import CudaIpcReader, GpuMemory
from kvtransfer.reader import PageRef, PeerPages, ReadError
from protos import decode_pb2, decode_pb2_grpc, kv_pb2
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
from wire.kv_layout import TEST_BYTES, PagePart

GPU_PROCESS = (*COMMAND, "fake-gpu")
PROMPT = [(number * 7) % 50 + 1 for number in range(23)]


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """`count_opened` collects garbage: this excludes what was loaded before these tests."""
    spare_what_is_here()
    yield
    gc.unfreeze()


class Peer:
    """What a reader knows of its peer."""

    parts, rank, num_ranks, page_bytes = (PagePart(1, 512),), 0, 1, 512

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()  # threads that copied
        self.is_alive = True
        self.error: RuntimeError | None = None  # an error of CUDA
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    # the file

    @property
    def generations(self) -> "Peer":
        return self

    def __getitem__(self, page: int) -> int:
        self.events.append(f"generation {page}")
        return 1

    def is_held(self) -> bool:
        self.events.append("alive?")
        return self.is_alive

    # the pages

    def end_if_lost(self) -> None:
        self.events.append("lost?")

    def load(self, begin: int, num_bytes: int) -> list[NDArray[np.uint8]]:
        assert (begin, num_bytes) == (9 * 512, TEST_BYTES)
        return [np.frombuffer(b"test", np.uint8)] * 2

    def open_peer(self, handle: bytes, num_pages: int, page_bytes: int) -> "Peer":
        assert (handle, num_pages, page_bytes) == (b"a handle", 9, 512)
        return self

    def copy(self, pages: Sequence[int], into: Sequence[int], source: int, target: int, num_bytes: int) -> None:
        assert (source, target, num_bytes) == (0, 0, 512)
        self.threads.add(threading.get_ident())
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        if self.error:
            raise self.error
        self.events.append(f"copied {list(pages)} to {list(into)}")

    def probe(self, num_pages: int, source: int, num_bytes: int) -> None:
        self.copy(range(num_pages), range(num_pages), 0, 0, 512)

    def close(self) -> None:
        self.events.append("closed")
        if self.error:
            raise self.error


def with_peer(scenario: Callable[[Peer, CudaIpcReader], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def test() -> None:
        peer, message = Peer(), kv_pb2.Peer(num_pages=9)
        memory = GpuMemory("gpu-0", ("gpu-0",), b"a handle", zlib.crc32(b"test"))
        message.ranks.add(pid=77, transports={"cuda_ipc": memory.pack()})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_ipc, "PeerFile", lambda _message, page_bytes, rank: peer)
            await scenario(peer, await CudaIpcReader.open(build_local(cast(Pool, peer), "reader"), message))

    return test


async def begin_read(peer: Peer, opened: CudaIpcReader) -> asyncio.Task[None]:
    """A read whose copy has begun and is held."""
    peer.may_end.clear()
    reading = asyncio.create_task(opened.read(REFS, INTO))
    await asyncio.to_thread(peer.has_begun.wait, PATIENCE_S)
    return reading


REFS, INTO = [PageRef(5, 1), PageRef(8, 1)], [3, 4]
COPIED = "copied [5, 8] to [3, 4]"


@with_peer
async def test_generations_are_read_after_the_copy_of_another_thread(peer: Peer, opened: CudaIpcReader) -> None:
    await opened.read(REFS, INTO)
    assert peer.events == ["alive?", COPIED, "alive?", "generation 5", "generation 8"]
    assert peer.threads.isdisjoint({threading.get_ident()})
    with pytest.raises(ReadError, match="page 8 was recycled: offered at generation 0, now 1") as error:
        await opened.read([PageRef(8, 0)], [3])
    assert error.value.reason == "generation"


@with_peer
async def test_memory_of_a_dead_peer_is_neither_copied_nor_believed(peer: Peer, opened: CudaIpcReader) -> None:
    reading = await begin_read(peer, opened)
    peer.is_alive = False
    peer.may_end.set()
    with pytest.raises(ReadError, match="process 77 is gone") as error:
        await reading
    assert error.value.reason == "transport" and peer.events == ["alive?", COPIED, "alive?"]
    peer.events.clear()
    with pytest.raises(ReadError, match="process 77 is gone"):
        await opened.read(REFS, INTO)
    assert peer.events == ["alive?"] and opened.is_gone()


@with_peer
async def test_many_pages_are_copied_in_pieces_each_from_a_living_peer(peer: Peer, opened: CudaIpcReader) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "PIECE_BYTES", 2 * 512)
        refs = [PageRef(page, 1) for page in (4, 5, 6)]
        await opened.read(refs, [0, 1, 2])
        copies = ["alive?", "copied [4, 5] to [0, 1]", "alive?", "copied [6] to [2]", "alive?"]
        assert peer.events[:5] == copies
        peer.events.clear()
        peer.may_end.clear()
        peer.has_begun.clear()
        dying = asyncio.create_task(opened.read(refs, [0, 1, 2]))
        await asyncio.to_thread(peer.has_begun.wait, PATIENCE_S)
        peer.is_alive = False
        peer.may_end.set()
        with pytest.raises(ReadError, match="process 77 is gone"):
            await dying
        assert peer.events == copies[:3], "nothing more is copied"


@with_peer
async def test_a_cancelled_read_and_a_close_end_after_the_copy_under_way(peer: Peer, opened: CudaIpcReader) -> None:
    reading = await begin_read(peer, opened)
    reading.cancel()
    closing = asyncio.create_task(opened.close())
    done, _ = await asyncio.wait([reading, closing], timeout=0.05)
    assert not done
    peer.may_end.set()
    await asyncio.wait([reading, closing])
    assert reading.cancelled() and peer.events == ["alive?", COPIED, "closed"]


@with_peer
async def test_what_cuda_says_is_the_refusal_and_does_not_hinder_the_close(peer: Peer, opened: CudaIpcReader) -> None:
    peer.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    for call in (opened.read(REFS, INTO), opened.probe(1)):
        with pytest.raises(ReadError, match="illegal memory access") as error:
            await call
        assert error.value.reason == "transport" and peer.events.pop() == "lost?"
    await opened.close()
    assert peer.events[-1] == "closed"


@pytest.mark.parametrize(
    ("error", "ends"),
    [(None, 0), ("CUDA error: an illegal memory access was encountered", 1), ("CUDA out of memory", 0)],
)
def test_a_process_whose_gpu_is_lost_ends_though_it_has_no_steps(
    error: str | None, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ended = build_pool(3, FakeGpu()), []

    def fail(launch: Callable[[], object]) -> None:
        raise RuntimeError(error)

    if error:
        monkeypatch.setattr(store.gpu, "run", fail)
    monkeypatch.setattr(pool_module, "end_process", lambda: ended.append(1))
    store.end_if_lost()
    assert len(ended) == ends


@pytest.fixture(scope="module")
def lasting() -> Iterator[kv_pb2.Peer]:
    with Exporter(GPU_PROCESS, NUM_PAGES) as process:
        yield process.peer


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
        ({"num_pages": 0}, "layout", "without pages"),
        ({"num_pages": 2**32 - 1}, "layout", "leave no room"),
        ({"pages_offset": 0}, "layout", "leave no room"),
        ({"pages_offset": 8192}, "layout", "has 4096 bytes where 8192 were announced"),
        ({"pool_fd": 9999}, "transport", "cannot open"),
        ({"pool_fd": 0}, "layout", "not the memory file of a pool"),
        ({"pid": 2**32 - 1}, "transport", "cannot open"),
    ],
)
async def test_peers_that_lie_are_refused_and_nothing_stays_open(
    lie: dict[str, object], reason: str, words: str, lasting: kv_pb2.Peer
) -> None:
    store = build_pool(3, FakeGpu())
    before = count_opened()
    with pytest.raises(ReadError, match=words) as error:
        await CudaIpcReader.open(build_local(store, "reader"), changed(lasting, **lie))
    assert error.value.reason == reason and count_opened() == before


def test_a_pool_is_closed_once_and_then_no_longer_read(lasting: kv_pb2.Peer) -> None:
    store = build_pool(3, FakeGpu())
    before = count_opened()
    pages = store.open_peer(gpu_of(lasting).handle, NUM_PAGES, store.page_bytes)
    assert count_opened() == before + 1
    for _again in range(2):
        pages.close()
        assert count_opened() == before
    with pytest.raises(RuntimeError, match="closed before the copy"):
        pages.copy([0], [0])


async def test_an_opening_that_is_cancelled_is_closed(lasting: kv_pb2.Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    pool = build_pool(3, FakeGpu())
    open_peer = pool.open_peer

    def open_slowly(handle: bytes, num_pages: int, page_bytes: int) -> PeerPages:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)
        return open_peer(handle, num_pages, page_bytes)

    monkeypatch.setattr(pool, "open_peer", open_slowly)
    before = count_opened()
    opening = asyncio.create_task(CudaIpcReader.open(build_local(pool, "reader"), lasting))
    await asyncio.to_thread(has_begun.wait, PATIENCE_S)
    opening.cancel()
    may_end.set()
    await asyncio.wait([opening])
    assert opening.cancelled() and count_opened() == before


async def shake_hands(stub: decode_pb2_grpc.DecodeStub, peer: kv_pb2.Peer) -> str:
    answer: decode_pb2.HandshakeResponse = await stub.Handshake(decode_pb2.HandshakeRequest(peer=peer))
    return answer.transport


async def test_offered_pages_are_read_from_the_gpu_of_another_process_until_it_dies(
    monkeypatch: pytest.MonkeyPatch,
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
            ours = await CudaIpcReader.open(build_local(build_pool(3, FakeGpu()), "reader"), peer)
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


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_auto_reads_gpu_memory_if_its_test_bytes_are_right_and_tells_why_not(
    is_wrong: bool, lasting: kv_pb2.Peer
) -> None:
    news = Signal()
    async with (
        prefill_worker(news) as prefill,
        decode_worker(news, "auto", built=build_kv_engine(gpu=FakeGpu())) as decode,
        gateway(decode, news) as opened,
    ):
        checksum = gpu_of(lasting).test_checksum ^ is_wrong
        peer = changed(lasting, address=prefill.peer.address, test_checksum=checksum)  # which serves pages by gRPC
        peer.incarnation = prefill.peer.incarnation
        decode.peers._is_required = False  # as auto has it
        with capture_logs() as logs:
            assert await shake_hands(opened.stub, peer) == ("grpc" if is_wrong else "cuda_ipc")
        warnings = [(it["asked"], it["used"], it["why"]) for it in logs if it["log_level"] == "warning"]
        status: decode_pb2.WorkerStatus = await opened.stub.Status(decode_pb2.StatusRequest())
        why, costs = status.transport_reasons[peer.address], status.chunk_costs
        assert costs.tokens == CHUNK_TOKENS and costs.read_token_seconds == pytest.approx(
            decode.pool.page_bytes / PAGE_TOKENS / status.probed_bytes_per_s[peer.address]
        )
        if is_wrong:
            assert warnings == [("cuda_ipc", "grpc", why)] and why.startswith(
                "cuda_ipc failed: the GPU memory of process "
            )
            assert f"reads wrong here: its {TEST_BYTES} test bytes have checksum" in why
        else:
            assert not warnings and why == "the peer's GPU memory can be opened on this host"
