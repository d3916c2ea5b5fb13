"""The hand-over between workers: real services, loops and readers in one process, with a runner instead of a model."""

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from protos import decode_pb2, kv_pb2, worker_pb2
from runtime.config_parts import Transport
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.handover import OTHER, PROMPT, answer, refusal, used, workers
from tests.support.real_workers import (
    NUM_PAGES,
    PAGE_TOKENS,
    DecodeWorker,
    Gateway,
    PrefillWorker,
    decode_worker,
    expected_answer,
    gateway,
    packed,
    prefill_worker,
)
from worker.sequences import Update


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_kv_is_handed_over_page_by_page(transport: Transport) -> None:
    async with workers(transport) as (opened, prefill, decode):
        expected_bytes = 0
        for handle, length in enumerate([1, 2, 4, 5, 6, 9, 23]):
            prompt = [token + 100 * handle for token in PROMPT[:length]]
            assert await answer(opened, prefill, handle, prompt) == expected_answer(prompt, 4)
            expected_bytes += -(-(length - 1) // PAGE_TOKENS) * decode.pool.page_bytes
        transferred = decode.metrics.registry.get_sample_value(
            "baton:kv_transfer_bytes_total", {"transport": transport}
        )
        assert transferred == expected_bytes, "each page once"
        assert decode.metrics.registry.get_sample_value("baton:prompt_tokens_total") == 0
        assert decode.peers.transports() == {prefill.peer.address: transport}


async def test_offers_are_larger_where_reading_is_fast() -> None:
    async with workers("shm") as (opened, prefill, decode):
        address = decode.peer.address
        assert prefill.sender.offer_factor(address) == 1
        await answer(opened, prefill, 0, PROMPT)
        ((_, target),) = prefill.sender._targets.items()
        for transport, factor in {"shm": 1, "cuda_ipc": 8, "nixl:rc_mlx5": 8, "nixl:tcp": 1}.items():
            target.transport = transport
            assert prefill.sender.offer_factor(address) == factor, transport


async def test_a_mismatched_pair_is_refused_naming_both_values() -> None:
    async with workers() as (opened, prefill, decode):
        prefill.peer.layout.dtype = "bfloat16"
        ticket = await opened.reserve(1, PROMPT)
        code, detail = await refusal(prefill.run(ticket, PROMPT))
        assert code is grpc.StatusCode.ABORTED
        assert "dtype differs: 'float32' here, 'bfloat16' there" in detail
        assert prefill.peer.address in detail and decode.peer.address in detail
        await opened.signal.until(lambda: used(prefill) == 0)  # just after the refusal is sent


async def test_decode_workers_that_are_gone_are_forgotten_and_those_there_are_not() -> None:
    async with workers() as (opened, prefill, decode):
        assert await answer(opened, prefill, 1) == expected_answer(PROMPT, 4)
        for port in (1, 2, 3):
            ticket = kv_pb2.Ticket(address=f"127.0.0.1:{port}", incarnation="gone", session=1, attempt=1, end=1)
            code, detail = await refusal(prefill.run(ticket, PROMPT[:2]))
            assert code is grpc.StatusCode.ABORTED
            assert detail.startswith(f"decode worker 127.0.0.1:{port}: UNAVAILABLE: ")
        assert [address for address, _ in prefill.sender._targets.items()] == [decode.peer.address]
        assert await answer(opened, prefill, 2, OTHER) == expected_answer(OTHER, 4)


async def test_a_restarted_decode_worker_is_greeted_anew() -> None:
    signal = Signal()
    async with prefill_worker(signal) as prefill:
        async with decode_worker(signal) as before, gateway(before, signal) as opened:
            assert await answer(opened, prefill, 1) == expected_answer(PROMPT, 4)
            old_ticket = await opened.reserve(2, OTHER)
        port = int(before.peer.address.rsplit(":")[1])
        async with decode_worker(signal, port=port) as after, gateway(after, signal) as opened:
            code, detail = await refusal(prefill.run(old_ticket, OTHER))
            assert code is grpc.StatusCode.ABORTED
            assert before.peer.incarnation in detail and after.peer.incarnation in detail
            assert await answer(opened, prefill, 1) == expected_answer(PROMPT, 4)
        status = await prefill.worker.Status(worker_pb2.StatusRequest())
        (weakness,) = [one for one in status.weaknesses if "another worker than was meant" in one]
        assert after.peer.address in weakness and "--advertise-host" in status.weaknesses[weakness]
        await signal.until(lambda: used(prefill) == 0)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_restarted_prefill_worker_takes_the_place_of_the_old_one(transport: Transport) -> None:
    signal = Signal()
    async with decode_worker(signal, transport) as decode, gateway(decode, signal) as opened:
        async with prefill_worker(signal) as before:
            assert await answer(opened, before, 1) == expected_answer(PROMPT, 4)
        async with prefill_worker(signal, port=int(before.peer.address.rsplit(":")[1])) as after:
            assert await answer(opened, after, 2, OTHER) == expected_answer(OTHER, 4)
            ticket = await opened.reserve(3, [*OTHER, 1][1:])
            ref = kv_pb2.PageRef(page=0, generation=int(before.pool.generations[0]))
            late = kv_pb2.OfferRequest(ticket=ticket, incarnation=before.peer.incarnation, end=PAGE_TOKENS, pages=[ref])
            response = await opened.stub.Offer(late)
            assert (response.accepted, response.reason) == (False, "handshake")
            assert len(decode.peers.transports()) == 1


async def test_a_run_cancelled_in_the_middle_of_an_offer_frees_pages_on_both_sides() -> None:
    async with workers("shm") as (opened, prefill, decode):
        await opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=prefill.peer))
        is_stuck = threading.Event()
        decode.peers._pools[0].local.executor.submit(is_stuck.wait, PATIENCE_S)  # the copy has to wait
        ticket = await opened.reserve(1, PROMPT)
        call = prefill.run(ticket, PROMPT)
        running = asyncio.ensure_future(call)
        signal = opened.signal
        while not any(session.is_read for session in decode.scheduler):  # noqa: ASYNC110, no event for it
            await asyncio.sleep(0)
        running.cancel()
        await signal.until(lambda: used(prefill) == 0)
        await opened.abort(1)
        assert used(decode) == 6, "the copy may still write there"
        is_stuck.set()
        await signal.until(lambda: used(decode) == 0)
        assert await answer(opened, prefill, 2, OTHER) == expected_answer(OTHER, 4)
        cancelled = prefill.metrics.registry.get_sample_value("baton:cancelled_total", {"phase": "transfer"})
        assert cancelled == 1 or prefill.metrics.registry.get_sample_value(
            "baton:cancelled_total", {"phase": "prefill"}
        )


async def test_a_prefill_step_that_fails_ends_its_prompts_only() -> None:
    async with workers() as (opened, prefill, _decode):
        prefill.runner.failures.append(RuntimeError("out of memory"))
        code, detail = await refusal(prefill.run(await opened.reserve(1, PROMPT), PROMPT))
        assert (code, detail) == (
            grpc.StatusCode.INTERNAL,
            "out of memory in an engine step: lower --chunk-tokens (now 6)",
        )
        await opened.signal.until(lambda: used(prefill) == 0)  # just after the refusal is sent
        assert await answer(opened, prefill, 2) == expected_answer(PROMPT, 4)


async def test_a_decode_step_that_fails_ends_its_sessions_only() -> None:
    async with workers() as (opened, prefill, decode):
        decode.runner.failures.append(RuntimeError("out of memory"))
        await prefill.run(await opened.reserve(1, PROMPT), PROMPT)
        assert await opened.end_of(1) == ("error", "out of memory in an engine step: lower --kv-memory-mib (now 1)")
        await opened.signal.until(lambda: used(decode) == 0)
        assert await answer(opened, prefill, 2) == expected_answer(PROMPT, 4)


async def test_a_session_whose_kv_never_comes_ends_with_its_lease() -> None:
    async with workers(lease_s=0.05) as (opened, prefill, decode):
        ticket = await opened.reserve(1, PROMPT)
        assert await opened.end_of(1) == ("expired", "no KV arrived within the lease of 0.05 s (--lease-s)")
        await opened.signal.until(lambda: used(decode) == 0)
        code, detail = await refusal(prefill.run(ticket, PROMPT))
        assert code is grpc.StatusCode.ABORTED and "is not open here" in detail


async def test_a_lease_is_renewed_while_the_prompt_waits_and_the_prompt_ends_with_its_session() -> None:
    async with workers(heartbeat_s=0.02) as (opened, prefill, decode):
        prefill.runner.may_run.clear()  # as behind a long prompt
        tickets = [await opened.reserve(handle, PROMPT) for handle in (1, 2)]
        running = [asyncio.ensure_future(prefill.run(ticket, PROMPT)) for ticket in tickets]
        first = decode.scheduler.next_deadline()
        assert first is not None
        renewed, renew = list[int](), decode.receiver.renew

        def note(ticket: kv_pb2.Ticket) -> None:
            renew(ticket)
            renewed.append(ticket.session)
            opened.signal.fire()

        decode.receiver.renew = note  # type: ignore[method-assign]
        await opened.signal.until(lambda: min(renewed.count(ticket.session) for ticket in tickets) >= 3)
        assert (decode.scheduler.next_deadline() or 0.0) > first
        await opened.abort(2)
        code, detail = await refusal(running[1])
        assert code is grpc.StatusCode.ABORTED and "NOT_FOUND: session 2 is not open here" in detail
        prefill.runner.may_run.set()
        await running[0]
        assert await opened.end_of(1) == ("length", "")
        assert opened.tokens[1] == expected_answer(PROMPT, 4)


async def test_a_lease_is_renewed_while_steps_compute_less_than_a_page() -> None:
    async with workers(heartbeat_s=0.3) as (opened, prefill, decode):
        prefill.runner.may_run.clear()
        ticket = await opened.reserve(1, PROMPT)
        running = asyncio.ensure_future(prefill.run(ticket, PROMPT))
        first = decode.scheduler.next_deadline() or 0.0
        while decode.scheduler.next_deadline() == first:
            prefill.service.hand_overs.on_updates([Update(sequence) for sequence in prefill.scheduler])
            await asyncio.sleep(0.002)
        assert (decode.scheduler.next_deadline() or 0.0) > first
        prefill.runner.may_run.set()
        await running
        assert await opened.end_of(1) == ("length", "")


async def test_a_gateway_that_leaves_takes_its_sessions_along() -> None:
    async with workers() as (opened, _prefill, decode):
        await opened.reserve(1, PROMPT)
        async with gateway(decode, opened.signal, "other") as other:
            await other.reserve(1, PROMPT)
            assert used(decode) == 12
        await opened.signal.until(lambda: used(decode) == 6)
        code, detail = await refusal(other_reserve(opened))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert detail == "gateway other has no Steps stream open here"


async def other_reserve(opened: Gateway) -> None:
    await Gateway(opened.stub, opened.worker, "other", opened.signal).reserve(2, PROMPT)


async def test_a_second_stream_of_a_gateways_name_is_refused_and_does_not_harm_the_first() -> None:
    async with workers() as (opened, prefill, _decode):
        ticket = await opened.reserve(1, PROMPT)
        second = opened.stub.Steps(decode_pb2.StepsRequest(gateway="g"))
        code, detail = await refusal(second.read())
        assert (code, detail) == (grpc.StatusCode.ALREADY_EXISTS, "gateway g already has a Steps stream")
        await prefill.run(ticket, PROMPT)
        assert await opened.end_of(1) == ("length", "")


async def test_bad_reservations_and_runs_are_refused_by_name() -> None:
    reservations: list[tuple[dict[str, Any], str]] = [
        ({"prompt": b""}, "prompt and max_tokens must not be empty"),
        ({"prompt": b"12345"}, "prompt has 5 bytes, expected 4 for each token"),
        ({"prompt": packed([1, -1, 2])}, "prompt holds -1; the model of this worker has the tokens 0 to 999"),
        ({"prompt": packed([1, 1000, 2])}, "prompt holds 1000; the model of this worker has the tokens 0 to 999"),
        ({"max_tokens": 0}, "prompt and max_tokens must not be empty"),
        ({"max_tokens": 58}, "prompt and answer of 81 tokens exceed the context of 80"),
        ({"sampling": decode_pb2.SamplingParams(top_p=1.0, temperature=-1.0)}, "temperature is -1.0, expected"),
        ({"sampling": decode_pb2.SamplingParams()}, "top_p is 0.0, expected more than 0"),
    ]
    runs = [
        (0, 0, "positions [0, 0) of a prompt of 23 tokens are wanted"),
        (8, 8, "positions [8, 8) of a prompt of 23 tokens are wanted"),
        (0, 23, "positions [0, 23) of a prompt of 23 tokens are wanted"),
        (2, 22, "begin 2 is not on a page border (4 tokens a page)"),
    ]
    async with workers() as (opened, prefill, _decode):
        good: dict[str, Any] = {
            "gateway": "g", "handle": 1, "prompt": packed(PROMPT), "max_tokens": 4,
            "sampling": decode_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0),
        }  # fmt: skip
        calls: list[tuple[Awaitable[object], str]] = [
            *((opened.stub.Reserve(decode_pb2.ReserveRequest(**{**good, **bad})), why) for bad, why in reservations),
            *((prefill.run(kv_pb2.Ticket(begin=begin, end=end), PROMPT), why) for begin, end, why in runs),
        ]
        for call, why in calls:
            code, found = await refusal(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT and why in found


def value(worker: PrefillWorker | DecodeWorker, name: str) -> float:
    found = worker.metrics.registry.get_sample_value(f"baton:{name}")
    assert found is not None, name
    return found


def gauges(worker: PrefillWorker | DecodeWorker) -> tuple[float, float]:
    return value(worker, "leases_open"), value(worker, "kv_cache_usage_perc")


async def test_a_hand_over_is_counted_on_both_sides() -> None:
    async with workers() as (opened, prefill, decode):
        assert gauges(prefill) == gauges(decode) == (0, 0)
        prefill.runner.may_run.clear()
        tickets = [await opened.reserve(handle, PROMPT) for handle in (1, 2)]
        held = -(-len(PROMPT) // PAGE_TOKENS)
        assert gauges(decode) == (2, 2 * held / NUM_PAGES)
        calls = [asyncio.ensure_future(prefill.run(ticket, PROMPT)) for ticket in tickets]
        while gauges(prefill) != (2, used(prefill) / NUM_PAGES) or not used(prefill):  # noqa: ASYNC110, no event for it
            await asyncio.sleep(0.005)
        prefill.runner.may_run.set()
        told = [await call for call in calls]
        for handle in (1, 2):
            assert await opened.end_of(handle) == ("length", "")
        offers = value(decode, "offers_accepted_total")
        assert offers >= 2
        assert value(prefill, "offers_sent_total") == value(prefill, "offers_accepted_total") == offers
        assert value(decode, "kv_transfer_seconds_count") == offers
        assert value(decode, "kv_transfer_seconds_sum") == pytest.approx(sum(one.transfer_seconds for one in told))
        for name in ("queue", "prefill"):
            assert value(prefill, f"request_{name}_time_seconds_count") == 2
            seconds = sum(getattr(one, f"{name}_seconds") for one in told)
            assert value(prefill, f"request_{name}_time_seconds_sum") == pytest.approx(seconds) and seconds > 0
        assert value(decode, "leases_expired_total") == 0
        await opened.signal.until(lambda: used(prefill) == used(decode) == 0)
        assert gauges(prefill) == gauges(decode) == (0, 0)
