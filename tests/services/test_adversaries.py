"""An authenticated peer that lies: offers, layouts, memory and addresses that are not its own. Real services."""

import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import grpc
import pytest

from kvtransfer.reader import ReadError
from kvtransfer.shm import ShmReader
from protos import decode_pb2, decode_pb2_grpc, kv_pb2
from runtime.rpc import open_channel
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.pool_process import build_local, build_pool
from tests.support.real_workers import (
    NUM_PAGES,
    PAGE_TOKENS,
    DecodeWorker,
    Gateway,
    PrefillWorker,
    decode_worker,
    expected_answer,
    gateway,
    prefill_worker,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # pages [0, 4), [4, 8)
EDGE = 2**32
Scenario = Callable[[Gateway, PrefillWorker, DecodeWorker, decode_pb2_grpc.DecodeStub], Awaitable[None]]


def among_workers(scenario: Scenario) -> Callable[[], Awaitable[None]]:
    """Run `scenario` with a client's stub; afterwards an honest request is answered and no page is held."""

    async def test() -> None:
        signal = Signal()
        async with (
            prefill_worker(signal) as prefill,
            decode_worker(signal) as decode,
            gateway(decode, signal) as opened,
        ):
            async with open_channel(decode.peer.address) as channel:
                await scenario(opened, prefill, decode, decode_pb2_grpc.DecodeStub(channel))
            ticket = await opened.reserve(99, PROMPT)
            await prefill.run(ticket, PROMPT)
            assert await opened.end_of(99) == ("length", "")
            assert opened.tokens[99] == expected_answer(PROMPT, 4)
            await opened.abort(*range(99))
            await signal.until(lambda: decode.scheduler.kv.cache.num_held == prefill.scheduler.kv.cache.num_held == 0)

    return test


def count(decode: DecodeWorker, reason: str) -> float | None:
    return decode.metrics.registry.get_sample_value("baton:offers_refused_total", {"reason": reason})


def build_offer(
    ticket: kv_pb2.Ticket, prefill: PrefillWorker, begin: int = 0, end: int = 4, *pages: int
) -> kv_pb2.OfferRequest:
    refs = [kv_pb2.PageRef(page=page, generation=0) for page in pages or (1,)]
    return kv_pb2.OfferRequest(
        ticket=ticket, incarnation=prefill.peer.incarnation, begin=begin, end=end, pages=refs, request_id="r"
    )


@among_workers
async def test_offers_that_lie_are_refused_by_name(
    opened: Gateway, prefill: PrefillWorker, decode: DecodeWorker, stub: decode_pb2_grpc.DecodeStub
) -> None:
    ticket = await opened.reserve(1, PROMPT)
    other = await opened.reserve(2, PROMPT[:2])
    honest = build_offer(ticket, prefill)

    async def reason(offer: kv_pb2.OfferRequest, detail: str = "") -> str:
        answer = await stub.Offer(offer, timeout=PATIENCE_S)
        assert answer.accepted is False and answer.detail and detail in answer.detail
        return str(answer.reason)

    assert await reason(honest) == "handshake", "no handshake yet"
    await stub.Handshake(decode_pb2.HandshakeRequest(peer=prefill.peer), timeout=PATIENCE_S)
    foreign = kv_pb2.OfferRequest()
    foreign.CopyFrom(honest)
    foreign.incarnation = "somebody else"
    assert await reason(foreign, "incarnation somebody else has not shaken hands here") == "handshake"
    for field, value, expected, detail in [
        ("incarnation", "gone", "incarnation", "ticket of incarnation gone; this worker is "),
        ("session", 2**64 - 1, "session", f"session {2**64 - 1} is not open here"), ("session", 0, "session", ""),
        ("attempt", 2, "attempt", "offer of attempt 2; session 1 is 1"), ("session", other.session, "bounds", ""),
        ("adapter", "a1", "adapter", "offer of adapter 'a1'; session 1 has ''"),
    ]:  # fmt: skip
        changed = kv_pb2.OfferRequest()
        changed.CopyFrom(honest)
        setattr(changed.ticket, field, value)
        assert await reason(changed, detail) == expected, field
    for begin, end in [
        (0, EDGE - 1), (EDGE - 4, EDGE - 1), (EDGE - 4, 0), (4, 8), (4, 4), (8, 4), (0, 0), (0, 3), (1, 4), (0, 12),
    ]:  # fmt: skip
        assert await reason(build_offer(ticket, prefill, begin, end), f"[{begin}, {end})") == "bounds", (begin, end)
    many = build_offer(ticket, prefill, 0, 4, *range(200_000))
    assert await reason(many, "200000 pages offered for [0, 4), not 1") == "bounds"
    for page in (NUM_PAGES, 2**31, EDGE - 1):
        said = f"page {page} is outside the peer's pool of {NUM_PAGES} pages"
        assert await reason(build_offer(ticket, prefill, 0, 4, page), said) == "bounds"
    stale = build_offer(ticket, prefill)
    stale.pages[0].generation = 2**64 - 1
    assert await reason(stale, f"page 1 was recycled: offered at generation {2**64 - 1}, now 0") == "generation"
    refused = {name: count(decode, name) for name in ("handshake", "incarnation", "session", "attempt", "generation")}
    assert refused == {"handshake": 2, "incarnation": 1, "session": 2, "attempt": 1, "generation": 1}
    assert opened.tokens.get(1) is None, "no offer led to a token"


@among_workers
async def test_handshakes_that_lie_are_refused(
    opened: Gateway, prefill: PrefillWorker, decode: DecodeWorker, stub: decode_pb2_grpc.DecodeStub
) -> None:
    lies: list[dict[str, object]] = [
        {"num_pages": 0}, {"num_pages": EDGE - 1}, {"num_pages": NUM_PAGES + 1}, {"num_pages": NUM_PAGES - 1},
        {"pages_offset": 0}, {"pages_offset": 2**64 - 1}, {"pages_offset": prefill.peer.pages_offset + 512},
        {"pool_fd": 0}, {"pool_fd": EDGE - 1}, {"pid": 1}, {"pid": 0}, {"pid": EDGE - 1}, {"ranks": 0}, {"ranks": 2},
        {"ranks": 1025},
    ]  # fmt: skip
    for lie in lies:
        code = await shake_hands(stub, prefill.peer, **lie)
        assert code is grpc.StatusCode.FAILED_PRECONDITION, lie
    decode.peers._pools[0].local.timeout_s = 1.0  # resolving them may get no answer
    for address in ("", "unix:/etc/passwd", "127.0.0.1:1", "127.0.0.1", "a b", "x\0y", "%41:1", "[::1]:1"):
        code = await shake_hands(stub, prefill.peer, address=address, host="elsewhere")
        assert code is grpc.StatusCode.FAILED_PRECONDITION, address
    assert decode.peers.transports() == {}
    foreign = kv_pb2.Peer()
    foreign.CopyFrom(prefill.peer)
    foreign.layout.weights = "\N{SNOWMAN}" * 50_000  # gRPC sends details as a header, which has to stay short
    with pytest.raises(grpc.aio.AioRpcError, match="weights differs"):
        await stub.Handshake(decode_pb2.HandshakeRequest(peer=foreign), timeout=PATIENCE_S)
    with pytest.raises(grpc.aio.AioRpcError, match="ticket of incarnation x"):
        await stub.Renew(decode_pb2.RenewRequest(ticket=kv_pb2.Ticket(incarnation="x" * 100_000)), timeout=PATIENCE_S)


async def shake_hands(stub: decode_pb2_grpc.DecodeStub, peer: kv_pb2.Peer, **lie: object) -> grpc.StatusCode:
    changed = kv_pb2.Peer()
    changed.CopyFrom(peer)
    changed.incarnation = "liar"
    for field, value in lie.items():
        if field == "ranks":
            del changed.ranks[:]
            changed.ranks.extend([peer.ranks[0]] * cast(int, value))
            continue
        setattr(changed, field, value)
        if field in ("address", "pid", "host"):  # of its only rank
            setattr(changed.ranks[0], field, value)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Handshake(decode_pb2.HandshakeRequest(peer=changed), timeout=PATIENCE_S)
    return refusal.value.code()


@contextmanager
def opened_file(kind: str, folder: Path, size: int) -> Iterator[int]:
    """A file that is not a pool, but of a pool's size where possible."""
    path = folder / kind
    if kind == "pipe":
        os.mkfifo(path)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    elif kind == "socket":
        fd = socket.socket().detach()
    elif kind == "memory that may shrink":
        fd = os.memfd_create("baton-kv")
        os.ftruncate(fd, size)
    elif kind in ("/dev/zero", "/dev/null", "/proc/self"):
        fd = os.open(kind, os.O_RDONLY)
    else:
        path.write_bytes(b"\0" * size)
        fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "kind", ["file", "pipe", "socket", "memory that may shrink", "/dev/zero", "/dev/null", "/proc/self"]
)
def test_only_sealed_memory_is_mapped(kind: str, tmp_path: Path) -> None:
    store = build_pool(NUM_PAGES)
    size = store.pages_offset + NUM_PAGES * store.page_bytes
    with opened_file(kind, tmp_path, size) as fd:
        peer = kv_pb2.Peer(pool_fd=fd, num_pages=NUM_PAGES, pages_offset=store.pages_offset)
        peer.ranks.add(pid=os.getpid())
        with pytest.raises(ReadError) as refusal:
            ShmReader(build_local(store, "reader"), peer)
    assert refusal.value.reason in ("layout", "transport")
    assert "pool" in refusal.value.detail


def test_a_pool_cannot_shrink_under_its_readers() -> None:
    pool = build_pool(2)
    assert pool.fd is not None
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, PAGE_TOKENS)
