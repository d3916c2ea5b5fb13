"""Pages that one worker reads from another: the tokens are those of a prompt computed whole, whatever fails."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from protos import kv_pb2, worker_pb2
from runtime.config_parts import Transport
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.handover import PROMPT, refusal, used
from tests.support.real_workers import (
    PAGE_TOKENS,
    DecodeWorker,
    Gateway,
    PrefillWorker,
    decode_worker,
    expected_answer,
    gateway,
    prefill_worker,
)
from worker.metrics import WorkerMetrics

ANSWER = 6  # tokens
WHOLE = len(PROMPT[:-1]) // PAGE_TOKENS * PAGE_TOKENS  # tokens in whole pages


def read_tokens(metrics: WorkerMetrics, source: str) -> float:
    return metrics.registry.get_sample_value("baton:kv_tokens_read_total", {"source": source}) or 0.0


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

    def source(self, **others: Any) -> kv_pb2.PageSource:
        peer = self.lender.peer
        fields = {"address": peer.address, "incarnation": peer.incarnation, "tokens": WHOLE, **others}
        return kv_pb2.PageSource(**fields)

    def borrowed(self) -> float:
        return read_tokens(self.reader.metrics, "prefill")


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


@dataclass
class History:
    """A decode worker that has a turn of a conversation, its answer included, and the next turn's prompt."""

    lender: DecodeWorker
    opened: Gateway
    prompt: list[int]

    @property
    def source(self) -> kv_pb2.PageSource:
        return source_of(self.lender.peer, self.num_lent)

    @property
    def num_lent(self) -> int:
        """In whole pages; the last token of an answer has no KV."""
        return (len(PROMPT) + ANSWER - 1) // PAGE_TOKENS * PAGE_TOKENS


def source_of(peer: kv_pb2.Peer, tokens: int) -> kv_pb2.PageSource:
    return kv_pb2.PageSource(address=peer.address, incarnation=peer.incarnation, tokens=tokens)


@asynccontextmanager
async def history(signal: Signal, is_running: bool = False) -> AsyncIterator[History]:
    """`is_running`: the answer goes on."""
    async with decode_worker(signal) as lender, gateway(lender, signal) as opened:
        lender.runner.pauses_after_token = is_running
        await opened.ask(1, PROMPT, ANSWER + 20 * is_running, local=99)
        for number in range(ANSWER * is_running):
            await signal.until(lambda number=number: len(opened.tokens.get(1, ())) == number + 1)  # type: ignore[misc]
            if number + 1 < ANSWER:
                lender.runner.may_run.set()
        if not is_running:
            await opened.end_of(1)
        yield History(lender, opened, [*PROMPT, *opened.tokens[1][:ANSWER], 7, 8, 9])
        lender.runner.pauses_after_token = False
        lender.runner.may_run.set()
        await opened.abort(1)
        await signal.until(lambda: used(lender) == 0)


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_prefill_worker_reads_what_decode_generated(is_running: bool) -> None:
    signal = Signal()
    async with history(signal, is_running) as before, prefill_worker(signal) as prefill:
        async with decode_worker(signal) as decode, gateway(decode, signal, "h") as opened:
            reserved = await opened.ask(1, before.prompt)
            told = await prefill.run(reserved.ticket, before.prompt, source=before.source)
            assert await opened.end_of(1) == ("length", "")
            assert opened.tokens[1] == expected_answer(before.prompt, 4)
            assert told.cached_tokens == before.num_lent == told.read_tokens.decode > len(PROMPT)
            again = await prefill.run((await opened.ask(2, before.prompt, num_prompt_logprobs=0)).ticket, before.prompt)
            assert again.cached_tokens == 28 and not again.read_tokens.decode, "now it is cached"
            status = await prefill.worker.Status(worker_pb2.StatusRequest())
            assert status.read_tokens.decode == before.num_lent == status.restored_tokens
            assert read_tokens(prefill.metrics, "decode") == before.num_lent
        await signal.until(lambda: used(prefill) == 0)


async def test_an_answer_moves_to_another_decode_worker_with_its_kv() -> None:
    """It lacks less than a page then, and needs no prefill worker."""
    signal = Signal()
    async with history(signal, is_running=True) as before:
        tokens = before.prompt[: len(PROMPT) + ANSWER]
        await before.opened.worker.Drain(worker_pb2.DrainRequest())
        async with decode_worker(signal) as decode, gateway(decode, signal, "h") as opened:
            reserved = await opened.ask(1, tokens, 4, num_emitted=ANSWER, source=before.source)
            assert reserved.ticket.begin == before.num_lent and not reserved.needs_prefill
            await opened.end_of(1)
            assert opened.tokens[1] == expected_answer(tokens, 4)
            assert opened.told[1].timing.read_tokens.decode == before.num_lent
            await signal.until(lambda: used(decode) == 0)


async def test_a_stranger_is_refused() -> None:
    async with pair() as both:
        me = both.lender.peer.incarnation
        for request, problem in (
            (worker_pb2.LendRequest(incarnation="other"), "incarnation other was asked"),
            (worker_pb2.LendRequest(incarnation=me, keys=[b"x"], begin=2), "page 2 is wanted, and 1 have keys"),
            (worker_pb2.LendRequest(incarnation=me, reader=kv_pb2.Peer()), "0 ranks"),
        ):
            assert problem in (await refusal(both.lender.worker.Lend(request, timeout=PATIENCE_S)))[1]
        nothing = await both.lender.worker.Lend(worker_pb2.LendRequest(incarnation=me, keys=[b"x" * 3]))
        assert not nothing.offer.pages
