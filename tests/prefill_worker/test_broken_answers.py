"""One broken answer of each rpc between workers: the call fails, and the next attempt has the right tokens."""

import grpc
import pytest

from runtime import rpc
from tests.support.garbling import Garbler
from tests.support.handover import OTHER, PROMPT, answer, refusal, workers
from tests.support.real_workers import expected_answer
from tests.worker.test_loans import pair


@pytest.fixture
def garbler(monkeypatch: pytest.MonkeyPatch) -> Garbler:
    """Of all servers in this process."""
    garbler, build = Garbler(), rpc.build_server
    monkeypatch.setattr(rpc, "build_server", lambda interceptors=(), *others: build([garbler, *interceptors], *others))
    return garbler


@pytest.mark.parametrize("method", ["Handshake", "Offer", "Renew"])
async def test_a_broken_answer_of_the_decode_worker_fails_one_attempt(method: str, garbler: Garbler) -> None:
    async with workers(heartbeat_s=0.05) as (opened, prefill, _):
        garbler.wanted[method] = 1
        ticket = await opened.reserve(1, PROMPT)
        if method == "Renew":
            prefill.runner.may_run.clear()
        code, detail = await refusal(prefill.run(ticket, PROMPT))
        prefill.runner.may_run.set()
        assert code is grpc.StatusCode.ABORTED and f"is no answer of /baton.v1.Decode/{method}" in detail
        assert garbler.garbled == [method]
        await opened.abort(1)
        assert await answer(opened, prefill, 2) == expected_answer(PROMPT, 4)
        assert await answer(opened, prefill, 3, OTHER) == expected_answer(OTHER, 4)


@pytest.mark.parametrize("method", ["Lend", "Read"])
async def test_a_broken_answer_of_a_lender_costs_what_it_would_have_lent(method: str, garbler: Garbler) -> None:
    async with pair("grpc") as both:
        if method == "Read":
            await both.reader.borrower.peers.shake_hands(both.lender.peer)
        garbler.wanted[method] = 1
        assert await both.answer(1, both.reader, source=both.source()) == 0 == both.borrowed()
        assert garbler.garbled == [method]


async def test_a_broken_read_of_offered_pages_fails_one_attempt(garbler: Garbler) -> None:
    async with workers("grpc") as (opened, prefill, decode):
        await decode.peers.shake_hands(prefill.peer)
        garbler.wanted["Read"] = 1
        ticket = await opened.reserve(1, PROMPT)
        code, detail = await refusal(prefill.run(ticket, PROMPT))
        assert code is grpc.StatusCode.ABORTED and "malformed message of 9 bytes" in detail
        await opened.abort(1)
        assert await answer(opened, prefill, 2) == expected_answer(PROMPT, 4)
