"""Pages that one prefill worker reads from another: the tokens are those of a prompt computed whole, whatever fails."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from protos import kv_pb2, prefill_pb2
from runtime.config_parts import Transport
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.handover import PROMPT, refusal, used
from tests.support.real_workers import (
    PAGE_TOKENS,
    Gateway,
    PrefillWorker,
    decode_worker,
    expected_answer,
    gateway,
    prefill_worker,
)

WHOLE = len(PROMPT[:-1]) // PAGE_TOKENS * PAGE_TOKENS  # tokens in whole pages


@dataclass
class Pair:
    """Two prefill workers, and the gateway's end of a decode worker that has no KV."""

    opened: Gateway
    lender: PrefillWorker
    reader: PrefillWorker
    lenders: AsyncExitStack  # closed: the lender is gone

    async def answer(self, handle: int, prefill: PrefillWorker, **source: Any) -> int:
        """Prompt tokens that the worker had cached. The tokens are right."""
        reserved = await self.opened.ask(handle, PROMPT)
        assert reserved.needs_prefill
        told = await prefill.run(reserved.ticket, PROMPT, **source)
        assert await self.opened.end_of(handle) == ("length", "")
        assert self.opened.tokens[handle] == expected_answer(PROMPT, 4)
        return int(told.cached_tokens)

    def source(self, **others: Any) -> prefill_pb2.PageSource:
        peer = self.lender.peer
        fields = {"address": peer.address, "incarnation": peer.incarnation, "tokens": WHOLE, **others}
        return prefill_pb2.PageSource(**fields)

    def borrowed(self) -> float:
        return self.reader.metrics.registry.get_sample_value("baton:kv_tokens_borrowed") or 0.0


@asynccontextmanager
async def pair(transport: Transport = "auto", **others: Any) -> AsyncIterator[Pair]:
    """The lender has the prompt's pages. Nothing is held at the end."""
    signal = Signal()
    async with AsyncExitStack() as lenders, prefill_worker(signal, transport=transport, **others) as reader:
        lender = await lenders.enter_async_context(prefill_worker(signal))
        async with decode_worker(signal) as first, gateway(first, signal) as opened:
            assert await Pair(opened, lender, reader, lenders).answer(1, lender) == 0
        async with decode_worker(signal) as decode, gateway(decode, signal, "h") as opened:
            yield Pair(opened, lender, reader, lenders)
        await signal.until(lambda: used(reader) == used(lender) == 0)
        reader.scheduler.check()


@pytest.mark.parametrize(("transport", "verifies"), [("shm", False), ("grpc", True)])
async def test_pages_are_read_and_stay(transport: Transport, verifies: bool) -> None:
    async with pair(transport, verify_transfers=verifies) as both:
        both.lender.scheduler.kv.max_offer_pages = 2  # more come in several parts
        assert await both.answer(1, both.reader, source=both.source()) == WHOLE == both.borrowed()
        assert both.reader.metrics.registry.get_sample_value("baton:prompt_tokens_total") == len(PROMPT) - 1 - WHOLE
        assert both.reader.borrower.peers.transports() == {both.lender.peer.address: transport}


@pytest.mark.parametrize("case", ["incarnation", "layout", "address", "evicted", "few"])
async def test_what_cannot_be_read_is_computed(case: str) -> None:
    async with pair() as both:
        source = both.source()
        match case:
            case "incarnation":
                source.incarnation = "before"
            case "layout":
                both.lender.peer.layout.dtype = "bfloat16"
            case "address":
                source.address = "127.0.0.1:1"
            case "evicted":
                kept = both.lender.scheduler.kv.cache
                kept.release(kept.allocate(kept.num_spare))
            case "few":
                source.tokens = 0
        assert await both.answer(1, both.reader, source=source) == 0 == both.borrowed()
        is_blamed = source.incarnation in both.reader.borrower._failed
        assert is_blamed == (case not in ("evicted", "few"))


async def test_pages_that_change_while_they_are_read_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair("grpc") as both:
        lent, loads = both.lender.pool, both.lender.pool.load

        def load(*args: Any, **others: Any) -> Any:
            rows = loads(*args, **others)
            lent.generations[:] += 1
            return rows

        monkeypatch.setattr(lent, "load", load)
        await both.reader.borrower.peers.shake_hands(both.lender.peer)
        assert await both.answer(1, both.reader, source=both.source()) == 0 == both.borrowed()
        assert not both.reader.borrower._failed


async def test_a_lender_may_die_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair("grpc", heartbeat_s=0.05) as both:
        is_reading, may_go_on = threading.Event(), threading.Event()
        await both.reader.borrower.peers.shake_hands(both.lender.peer)

        def load(*_: Any, **__: Any) -> Any:
            is_reading.set()
            may_go_on.wait(PATIENCE_S)
            raise RuntimeError("gone")

        monkeypatch.setattr(both.lender.pool, "load", load)
        asking = asyncio.ensure_future(both.answer(1, both.reader, source=both.source()))
        await asyncio.to_thread(is_reading.wait, PATIENCE_S)
        assert used(both.reader) > 0 and len(both.reader.scheduler.kv.restores) == 1
        await asyncio.sleep(0.2)  # leases are renewed meanwhile
        closing = asyncio.ensure_future(both.lenders.aclose())
        await asyncio.sleep(0)
        may_go_on.set()
        assert await asking == 0 == both.borrowed()
        await closing


async def test_a_stranger_is_refused() -> None:
    async with pair() as both:
        me = both.lender.peer.incarnation
        for request, problem in (
            (prefill_pb2.LendRequest(incarnation="other"), "incarnation other was asked"),
            (prefill_pb2.LendRequest(incarnation=me, keys=[b"x"], begin=2), "page 2 is wanted, and 1 have keys"),
            (prefill_pb2.LendRequest(incarnation=me, reader=kv_pb2.Peer()), "0 ranks"),
        ):
            assert problem in (await refusal(both.lender.stub.Lend(request, timeout=PATIENCE_S)))[1]
        nothing = await both.lender.stub.Lend(prefill_pb2.LendRequest(incarnation=me, keys=[b"x" * 3]))
        assert not nothing.offer.pages
