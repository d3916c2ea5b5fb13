"""Which readers a decode worker keeps, and gateways' messages that overtake each other: real services, no model."""

import asyncio
import gc
import threading
import weakref
from pathlib import Path

import grpc
import pytest

from engine.kv.pool import Pool
from kvtransfer.grpc_bytes import GrpcReader
from kvtransfer.reader import Reader, ReadError
from protos import decode_pb2, kv_pb2
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.pool_process import build_pool
from tests.support.real_workers import (
    NUM_PAGES,
    PAGE_TOKENS,
    DecodeWorker,
    build_identity,
    decode_worker,
    gateway,
    prefill_worker,
)
from worker.peers import kv_peers

PROMPT = [(number * 7) % 50 + 1 for number in range(23)]


class Readers:
    """The readers that a decode worker opened, and those it has closed."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.opened: list[Reader] = []
        self.closed: list[Reader] = []
        self._open = worker.peers._open_readers
        worker.peers._open_readers = self._note  # type: ignore[method-assign]

    async def _note(self, transport: str, peer: kv_pb2.Peer) -> list[Reader]:
        (reader,) = await self._open(transport, peer)
        close = reader.close

        async def close_noting() -> None:
            self.closed.append(reader)
            await close()

        reader.close = close_noting  # type: ignore[method-assign]
        self.opened.append(reader)
        return [reader]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for dead peers all the time."""
    monkeypatch.setattr(kv_peers, "LOOK_S", 0.005)


@pytest.mark.usefixtures("soon")
async def test_the_pool_of_a_dead_process_is_let_go_of_without_another_handshake() -> None:
    signal = Signal()
    async with decode_worker(signal, "shm") as decode, gateway(decode, signal) as opened:
        pool = build_pool(NUM_PAGES)
        num_mapped = count_mapped_pools()
        for _again in range(2):
            process, peer = await start_owner(pool)
            await opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=peer))
            assert count_mapped_pools() == num_mapped + 1
            process.kill()
            await process.wait()
            while count_mapped_pools() > num_mapped:  # noqa: ASYNC110, no event for it
                await asyncio.sleep(0.005)
            assert not decode.peers.transports() and not decode.peers._greeting


async def start_owner(pool: Pool) -> tuple[asyncio.subprocess.Process, kv_pb2.Peer]:
    """Another process that has `pool` open, and its handshake."""
    assert pool.fd is not None
    process = await asyncio.create_subprocess_exec("sleep", str(PATIENCE_S), pass_fds=[pool.fd])
    peer = build_identity("prefill", "127.0.0.1:1", pool)
    peer.pid = peer.ranks[0].pid = process.pid
    return process, peer


def count_mapped_pools() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


@pytest.mark.usefixtures("soon")
async def test_what_is_being_read_of_a_dead_process_is_read_to_its_end() -> None:
    signal = Signal()
    async with decode_worker(signal, "shm") as decode, gateway(decode, signal) as opened:
        readers = Readers(decode)
        pool = build_pool(NUM_PAGES)
        process, peer = await start_owner(pool)
        await opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=peer))
        is_stuck = threading.Event()
        decode.peers._pools[0].local.executor.submit(is_stuck.wait, PATIENCE_S)  # the copy has to wait
        ticket = await opened.reserve(1, PROMPT)
        refs = [kv_pb2.PageRef(page=page) for page in range(-(-ticket.end // PAGE_TOKENS))]
        offer = kv_pb2.OfferRequest(ticket=ticket, incarnation=peer.incarnation, end=ticket.end, pages=refs)
        offering = asyncio.ensure_future(opened.stub.Offer(offer))
        while not decode.peers.reading:  # noqa: ASYNC110, no event for it
            await asyncio.sleep(0)
        process.kill()
        await process.wait()
        await asyncio.sleep(0.05)  # ten checks
        assert not readers.closed
        is_stuck.set()
        assert (await offering).accepted
        while decode.peers.transports():  # noqa: ASYNC110, no event for it
            await asyncio.sleep(0.005)
        assert readers.closed == readers.opened
        await opened.abort(1)


async def test_a_copy_ends_though_its_call_was_cancelled_and_nothing_else_waits_for_it() -> None:
    signal = Signal()
    waiting: list[weakref.ref[asyncio.Future[None]]] = []

    async def read(*_: object) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting.append(weakref.ref(future))
        await future

    async with (
        decode_worker(signal, "grpc") as decode,
        prefill_worker(signal) as prefill,
        gateway(decode, signal) as opened,
    ):
        await opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=prefill.peer))
        ticket = await opened.reserve(1, PROMPT)
        refs = [kv_pb2.PageRef(page=page) for page in range(-(-ticket.end // PAGE_TOKENS))]
        offer = kv_pb2.OfferRequest(ticket=ticket, incarnation=prefill.peer.incarnation, end=ticket.end, pages=refs)
        decode.peers.read = read  # type: ignore[method-assign, assignment]
        receiver = decode.receiver
        call = asyncio.create_task(receiver.take(offer))
        while not waiting:  # noqa: ASYNC110, no event for it
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        del call
        gc.collect()
        future = waiting[0]()
        assert future is not None, "the copy was collected, and its pages stay held"
        future.set_exception(ReadError("transport", "over"))
        await opened.abort(1)


async def test_a_handshake_that_is_cancelled_closes_its_reader() -> None:
    signal = Signal()
    is_probing = asyncio.Event()

    async def slow_probe(reader: GrpcReader, num_pages: int) -> None:
        is_probing.set()
        await asyncio.Event().wait()

    async with (
        decode_worker(signal, "grpc") as decode,
        prefill_worker(signal) as prefill,
        gateway(decode, signal) as opened,
    ):
        readers = Readers(decode)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GrpcReader, "probe", slow_probe)
            call = opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=prefill.peer))
            await is_probing.wait()
            call.cancel()
            while not readers.closed:  # noqa: ASYNC110, no event for it
                await asyncio.sleep(0)
        assert readers.closed == readers.opened and not decode.peers.transports()
        await opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=prefill.peer))
        assert decode.peers.transports() == {prefill.peer.address: "grpc"}


async def test_a_peer_that_cannot_be_read_leaves_no_reader_behind() -> None:
    signal = Signal()
    async with decode_worker(signal, "grpc", lease_s=0.5) as decode, gateway(decode, signal) as opened:
        readers = Readers(decode)
        nobody = build_identity("prefill", "127.0.0.1:1", build_pool(NUM_PAGES))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=nobody))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert readers.closed == readers.opened and len(readers.opened) == 1 and not decode.peers.transports()
        assert not decode.peers._greeting
