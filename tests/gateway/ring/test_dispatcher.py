"""Requests between the gateway and fake workers behind real gRPC: what calls and streams do.

`ring` checks after each test that all places were given back. Decisions are tested without workers
(test_queue.py, test_attempts.py) and over random schedules of faults (tests/simulator).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from decode_worker import service
from gateway.ring import attempt, request_machine, worker_state
from gateway.ring.admission import Admission
from gateway.ring.fleet import Fleet
from gateway.router.engine_client import Generation, Grammar, Tokens
from gateway.ring.policy import NO_LIMIT
from gateway.ring.queue import Queue, Waiter
from gateway.ring.reasons import as_error
from gateway.ring.request_machine import Request
from gateway.ring.routing import Router
from protos import decode_pb2, kv_pb2, prefill_pb2
from runtime import rpc
from tests.support.dispatching import NO_ROOM, PROMPT, answer, bounded, failure, generation, pair, ring
from tests.support.fake_workers import (
    PAGE_TOKENS,
    PATIENCE_S,
    FakeDecode,
    FakePrefill,
    FakeWorker,
    Refusal,
    Signal,
    serving,
    token_at,
)
from tests.support.real_workers import MAX_RUNNING, decode_worker, gateway, prefill_worker
from wire.messages import unpack_tokens

WHOLE = (answer(4), "length")
INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "too long")
BAD_PART = ((rpc.FIELD_AT_FAULT, "grammar"), (rpc.PARAM_AT_FAULT, "tools[1].function.parameters"))
BAD_GRAMMAR = (grpc.StatusCode.INVALID_ARGUMENT, "not a regex", ((rpc.FIELD_AT_FAULT, "grammar"),))
BAD_SCHEMA = (grpc.StatusCode.INVALID_ARGUMENT, "bad at #/x", BAD_PART)
GONE = (grpc.StatusCode.UNAVAILABLE, "connection refused")
UNKNOWN = (grpc.StatusCode.FAILED_PRECONDITION, "no Steps stream")
COMPILING = (grpc.StatusCode.RESOURCE_EXHAUSTED, "still compiled", ((rpc.REFUSED_FOR, rpc.GRAMMAR_BUSY),))
TOO_LARGE = (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (67108870 vs. 67108864)")
ABORTED = (grpc.StatusCode.ABORTED, "offer refused")
LONG = tuple(range(2 * PAGE_TOKENS + 8))  # two whole pages and a part
LONG_WHOLE = ([token_at(len(LONG) + offset) for offset in range(4)], "length")


@pytest.fixture
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_state, "POLL_S", 0.02)


def bound() -> Generation:
    """A request whose answer must match a grammar."""
    return replace(generation(), grammar=Grammar("regex", "a+", "structured_outputs.regex"))


async def rest(stream: AsyncIterator[Tokens]) -> tuple[list[int], str | None]:
    parts = [part async for part in stream]
    return [token for part in parts for token in part.token_ids], parts[-1].finish_reason


# -- one attempt -----------------------------------------------------------------------------------------------------


@bounded
async def test_a_request_is_reserved_prefilled_and_answered() -> None:
    async with pair(is_manual=True) as (ring, decode, prefill):
        (decode_link,), (prefill_link,) = ring.fleet.decode.values(), ring.fleet.prefill.values()
        prefill.may_finish.clear()
        task = ring.start(generation())
        await ring.signal.until(lambda: bool(prefill.runs))
        assert (decode_link.state.num_mine, prefill_link.state.num_mine) == (1, 1)
        prefill.may_finish.set()
        await ring.signal.until(lambda: prefill_link.state.num_mine == 0)
        (session,), (run,) = decode.sessions, prefill.runs
        session.emit(3)
        session.emit(1, "length")
        assert await task == WHOLE
        assert session.prompt_ids == unpack_tokens(run.prompt).tolist() == list(PROMPT)
        assert (session.request.max_tokens, session.request.attempt, run.ticket.session) == (4, 1, 1)
        assert not decode.aborted, "a session that ended by itself is not aborted"


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_client_that_leaves_ends_the_work_on_both_workers(how: str) -> None:
    @bounded
    async def scenario() -> None:
        async with pair(is_manual=True) as (ring, decode, prefill):
            prefill.may_finish.clear()
            async with aclosing(ring.generate(generation())) as stream:
                task = asyncio.ensure_future(anext(stream))
                await ring.signal.until(lambda: bool(prefill.runs))
                if how == "closed":
                    decode.sessions[0].emit(1)
                    assert (await task).token_ids == (token_at(3),)
                else:
                    task.cancel()
                    await asyncio.wait([task])
                    assert task.cancelled()
            await ring.signal.until(lambda: decode.aborted == {decode.sessions[0].request.handle})
            await ring.signal.until(lambda: prefill.num_cancelled == 1)

    scenario()


@bounded
async def test_a_request_cancelled_in_the_very_moment_of_its_tokens_ends() -> None:
    """The tokens are in the inbox and the cancellation precedes the request's read: it must not be lost."""
    async with pair(is_manual=True) as (ring, _decode, prefill):
        task = ring.start(generation())
        await ring.signal.until(lambda: prefill.num_done == 1 and ring.num_held == 1)
        (link,) = ring.fleet.decode.values()
        (session,) = link.state.sessions.values()
        for _ in range(3):
            await asyncio.sleep(0)  # the request listens now
        session.put(decode_pb2.SessionDelta(handle=session.handle, attempt=1, token_ids=[token_at(3)]))
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S / 2)
        assert task.cancelled()


def test_a_bug_in_what_reads_prefills_answer_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_response: prefill_pb2.RunResponse) -> None:
        raise ZeroDivisionError

    @bounded
    async def scenario() -> None:
        monkeypatch.setattr(attempt, "unpack_prefill_timing", fail)
        async with pair(is_manual=True) as (ring, decode, _prefill):
            with pytest.raises(ZeroDivisionError):
                await ring.start(generation())
            await ring.signal.until(lambda: decode.aborted == {decode.sessions[0].request.handle})

    scenario()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "refusals", "status", "detail", "num_failed"),
    [
        ("decode", [INVALID], 400, "too long", 0),
        ("prefill", [INVALID], 400, "too long", 0),
        ("decode", [BAD_GRAMMAR], 400, "structured_outputs.regex cannot be used: not a regex", 0),
        ("decode", [BAD_SCHEMA], 400, "tools[1].function.parameters cannot be used: bad at #/x", 0),
        ("decode", [NO_ROOM] * 3, None, "", 0),
        ("prefill", [NO_ROOM] * 3, None, "", 0),
        ("decode", [GONE, UNKNOWN] * 5, None, "", 0),
        ("prefill", [GONE], None, "", 1),
        ("prefill", [ABORTED], None, "", 1),
        ("prefill", [TOO_LARGE], None, "", 1),
        ("decode", [TOO_LARGE] * 9, 503, "larger than max", 3),
        ("decode", [COMPILING] * 2, None, "", 0),
    ],
)
@pytest.mark.usefixtures("fast_polls")
def test_what_workers_refuse_with_decides_what_follows(
    role: str, refusals: list[Refusal], status: int | None, detail: str, num_failed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    @bounded
    async def scenario() -> None:
        monkeypatch.setattr(request_machine, "GRAMMAR_PAUSE_S", 0.01)
        async with pair() as (ring, decode, prefill):
            decode.is_manual = role == "prefill"
            worker: FakeWorker = decode if role == "decode" else prefill
            worker.refusals.extend(refusals)
            task = ring.start(bound())
            if role == "prefill" and status is None:
                await decode.has_sessions(len(refusals) + 1)
                limit = decode.sessions[-1].request.local_prefill_max_tokens
                assert limit == (NO_LIMIT if num_failed else 0), "decode prefills by itself after a failure"
                decode.sessions[-1].emit(4, "length")
            if status is None:
                assert await task == WHOLE
            else:
                error = await failure(task)
                assert error.status == status and detail in error.message
                named = "structured_outputs.regex" if refusals == [BAD_GRAMMAR] else "tools[1].function.parameters"
                assert error.param == (named if "cannot be used" in detail else None)
            assert ring.num_failed_attempts == num_failed
            is_gone = role == "decode" and GONE in refusals
            assert not is_gone or decode.num_status_calls > 1, "polled before it gets another request"

    scenario()


@bounded
async def test_others_are_served_while_a_grammar_is_compiled() -> None:
    async with pair(max_running=1) as (ring, decode, _prefill):
        decode.refusals.append(COMPILING)
        task = ring.start(bound())
        await ring.signal.until(lambda: decode.num_reserve_calls == 1 and ring.num_held == 0)
        assert ring.num_waiting == 1
        assert await ring.collect(generation()) == WHOLE
        assert await task == WHOLE


@bounded
async def test_the_wait_for_a_grammar_adds_up() -> None:
    async with pair(is_manual=True) as (ring, decode, _prefill):
        decode.refusals.append(COMPILING)
        task = asyncio.create_task(ring.listen(bound()))
        await decode.has_sessions(1)
        decode.sessions[0].say(answer(4), "length", timing=decode_pb2.SessionTiming(grammar_seconds=1000.0))
        (only,) = await task
        assert only.timing is not None
        assert only.timing.grammar_s > 1000.0


@pytest.mark.parametrize("where", ["reserve", "answer", "grammar"])
def test_a_request_that_takes_too_long_ends_with_504(where: str) -> None:
    @bounded
    async def scenario() -> None:
        async with pair(is_manual=True, timeout_s=0.7) as (ring, decode, _prefill):
            if where == "reserve":
                decode.may_answer.clear()
            decode.refusals.extend([COMPILING] * (100 if where == "grammar" else 0))
            error = await failure(ring.start(bound()))
            assert (error.status, error.code) == (504, "timeout") and not ring.num_failed_attempts

    scenario()


@bounded
async def test_waiting_ends_with_places_in_time_or_when_it_is_cancelled() -> None:
    async with pair(max_running=1) as (ring, _decode, _prefill):
        queue = Queue(ring.fleet.states(), Router(0), 8, 0.0)
        admission = Admission(queue)
        ring.fleet.subscribe(admission.pump)

        def wait(seconds: float) -> "asyncio.Task[Waiter]":
            return asyncio.create_task(admission.wait(Request(generation(), time.monotonic() + seconds, 0.0, 0.0)))

        first = await wait(PATIENCE_S)
        late = (await wait(0.01)).reason
        assert late is not None and as_error(late).status == 503
        assert late.detail == "no worker had room within 0 s"
        second, third = wait(PATIENCE_S), wait(PATIENCE_S)
        await asyncio.sleep(0)
        assert (queue.num_placed, queue.num_waiting) == (1, 2)
        third.cancel()
        await asyncio.wait([third])
        assert queue.num_waiting == 1
        queue.leave(first)
        assert (queue.num_placed, queue.num_waiting) == (1, 0)
        second.cancel()  # at the moment it is placed
        await asyncio.wait([second])
        assert second.cancelled() and third.cancelled() and queue.num_placed == 0


@bounded
async def test_a_full_queue_refuses_with_429_and_keeps_its_order() -> None:
    async with pair(is_manual=True, max_running=1, max_queue=3) as (ring, decode, _prefill):
        tasks: list[asyncio.Task[Any]] = [ring.start(generation("r0"))]
        await decode.has_sessions(1)
        tasks.append(ring.start_all([generation("r1"), generation("r2"), generation("r3")]))
        await asyncio.sleep(0)
        assert ring.num_waiting == 3
        error = await failure(ring.start(generation("r4")))
        assert (error.status, error.code, error.retry_after_s) == (429, "overloaded", 1)
        for number in range(4):
            await decode.has_sessions(number + 1)
            assert decode.sessions[number].request.request_id == f"r{number}"
            decode.sessions[number].emit(4, "length")
        assert [await task for task in tasks] == [WHOLE, [WHOLE] * 3]


# -- workers that die, stall and come back ---------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["stream", "server", "error"])
def test_an_answer_goes_on_elsewhere_without_losing_or_repeating_a_token(loss: str) -> None:
    @bounded
    async def scenario() -> None:
        signal = Signal()
        workers = [FakeDecode("D1", signal, is_manual=True), FakeDecode("D2", signal, is_manual=True)]
        async with AsyncExitStack() as stack:
            stacks = [await stack.enter_async_context(AsyncExitStack()) for _ in workers]
            addresses = [
                await own.enter_async_context(serving(worker)) for own, worker in zip(stacks, workers, strict=True)
            ]
            built = await stack.enter_async_context(ring(signal, addresses))
            stream = built.generate(generation(max_tokens=6))
            first = asyncio.ensure_future(anext(stream))
            await signal.until(lambda: any(worker.sessions for worker in workers))
            one = next(number for number, worker in enumerate(workers) if worker.sessions)
            other = workers[1 - one]
            workers[one].sessions[0].emit(2)
            assert list((await first).token_ids) == answer(2)
            others = asyncio.create_task(rest(stream))
            if loss == "stream":
                workers[one].break_streams()
            elif loss == "error":
                workers[one].sessions[0].say([], "error", "the engine step failed")
            else:
                await stacks[one].aclose()
            await signal.until(lambda: bool(other.sessions))
            retry = other.sessions[0].request
            assert other.sessions[0].prompt_ids == [*PROMPT, *answer(2)]
            assert (retry.max_tokens, retry.attempt) == (4, 2)
            other.sessions[0].emit(3)
            other.sessions[0].emit(1, "length")
            assert await others == (answer(6)[2:], "length")

    scenario()


@bounded
async def test_a_started_answer_and_new_requests_wait_for_their_only_worker_to_come_back() -> None:
    """The started one goes first, the others in order; the prompts cached by the worker are forgotten."""
    signal = Signal()
    async with AsyncExitStack() as stack:
        async with AsyncExitStack() as life:
            before = FakeDecode("D1", signal, is_manual=True)
            address = await life.enter_async_context(serving(before))
            built = await stack.enter_async_context(ring(signal, [address], max_queue=3, patience_s=PATIENCE_S))
            memory = built.dispatcher._queue.router._memory
            started = built.start(generation("started", prompt=LONG))
            await before.has_sessions(1)
            before.sessions[0].emit(1)
            await signal.until(lambda: len(memory) == 2)
        await signal.until(lambda: built.dispatcher.check_ready() is not None)
        assert f"no decode worker is alive: {address}" in str(built.dispatcher.check_ready())
        tasks = [built.start(generation(name)) for name in ("r1", "r2")]
        await asyncio.sleep(0)
        assert built.num_waiting == 3
        assert (await failure(built.start(generation("one too many")))).status == 429
        after = FakeDecode("D2", signal)
        await stack.enter_async_context(serving(after, port=int(address.rsplit(":")[1])))
        stack.push_async_callback(built.is_idle)
        assert await started == LONG_WHOLE
        assert [await task for task in tasks] == [WHOLE] * 2
        assert [session.request.request_id for session in after.sessions] == ["started", "r1", "r2"]
        assert memory.find([*memory._keys["D2"]]).keys() == {"D2"}


@bounded
async def test_a_started_answer_ends_with_503_when_no_worker_comes_back() -> None:
    signal = Signal()
    decode = FakeDecode("D1", signal, is_manual=True)
    async with AsyncExitStack() as life:
        address = await life.enter_async_context(serving(decode))
        async with ring(signal, [address], patience_s=0.1) as built:
            task = built.start(generation())
            await decode.has_sessions(1)
            await life.aclose()
            error = await failure(task)
            assert error.status == 503 and f"no decode worker is alive: {address}" in error.message
            assert built.dispatcher.check_ready() == error.message


@pytest.mark.usefixtures("fast_polls")
@bounded
async def test_many_requests_with_every_kind_of_end_leave_nothing_behind() -> None:
    """Concurrent successes, refusals, failures and cancellations; `ring` checks that all places are free afterwards."""
    async with pair(max_running=3, max_queue=200) as (ring, decode, prefill):
        decode.refusals.extend([NO_ROOM, GONE, NO_ROOM, (grpc.StatusCode.INTERNAL, "no")] * 4)
        prefill.refusals.extend([NO_ROOM, ABORTED] * 4)
        tasks = [
            ring.start_all(
                [
                    replace(generation(f"r{group}-{number}", prompt=LONG), cache_salt=str(group % 4))
                    for number in range(group % 5 + 1)
                ]
            )
            for group in range(20)
        ]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[::3])
        whole = [result for result in results if isinstance(result, list)]
        assert len(whole) > len(tasks) // 3 and all(one == LONG_WHOLE for result in whole for one in result)
        assert not ring.dispatcher._queue.router._coming


# -- prompts cached by workers ---------------------------------------------------------------------------------------


@bounded
async def test_a_wrong_memory_costs_one_more_try_with_a_prefill_worker() -> None:
    async with pair(is_manual=True) as (ring, decode, prefill):
        for number in range(3):
            task = asyncio.create_task(ring.listen(generation(f"r{number}", prompt=LONG)))
            await decode.has_sessions(1 if number == 0 else number + 2)
            await ring.signal.until(partial(lambda wanted: prefill.num_done >= wanted, min(number + 1, 2)))
            await ring.signal.until(lambda: ring.num_held == 1)
            decode.sessions[-1].emit(4, "length")
            (only,) = await task
            assert only.timing is not None and only.timing.cached_tokens == (2 * PAGE_TOKENS if number == 2 else 0)
            if number == 0:
                decode.cached.clear()  # evicted
        first, wrong, again, last = (one.request for one in decode.sessions)
        assert [(one.request_id, one.attempt) for one in (first, wrong, again, last)] == [
            ("r0", 1), ("r1", 1), ("r1", 2), ("r2", 1),
        ]  # fmt: skip
        assert wrong.handle in decode.aborted and len(prefill.runs) == 2 and not ring.num_failed_attempts


# -- reports ---------------------------------------------------------------------------------------------------------


async def refused_for(call: Awaitable[object]) -> str:
    """The reason in the trailing metadata of a RESOURCE_EXHAUSTED."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(dict(tuple(error.value.trailing_metadata() or ()))[rpc.REFUSED_FOR])


def test_real_workers_say_what_they_have_not_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "GRAMMAR_WAIT_S", 0.01)

    @bounded
    async def scenario() -> None:
        signal = Signal()
        async with (
            prefill_worker(signal) as prefill,
            decode_worker(signal) as decode,
            gateway(decode, signal) as opened,
        ):
            prefill.scheduler.max_running = decode.scheduler.max_running = 0
            assert await refused_for(prefill.run(kv_pb2.Ticket(end=1), [1, 2])) == rpc.NO_ROOM
            assert await refused_for(opened.reserve(1, [1, 2])) == rpc.NO_ROOM
            grammar = decode_pb2.Grammar(kind="regex", text="a")
            assert await refused_for(opened.reserve(1, [1, 2], grammar=grammar)) == rpc.GRAMMAR_BUSY
            prefill.scheduler.max_running = decode.scheduler.max_running = MAX_RUNNING

    scenario()


@pytest.mark.usefixtures("fast_polls")
@pytest.mark.parametrize("context_tokens", [4096, 8192])
@pytest.mark.parametrize("weights", ["w", "v"])
def test_workers_that_do_not_fit_are_named_once(context_tokens: int, weights: str) -> None:
    logged: list[tuple[str, str]] = []

    async def hear_from_workers() -> None:
        signal = Signal()
        decode, prefill = FakeDecode("D1", signal), FakePrefill("P1", signal)
        decode.context_tokens, prefill.context_tokens = 4096, 8192
        prefill.peer.layout.weights = weights
        async with AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(serving(one)) for one in (prefill, decode)]
            fleet = Fleet(addresses[:1], addresses[1:], PATIENCE_S, PATIENCE_S, context_tokens)
            stack.push_async_callback(fleet.close)
            logs = stack.enter_context(capture_logs())
            fleet.start()
            await signal.until(lambda: min(decode.num_status_calls, prefill.num_status_calls) > 3)
            logged.extend((entry["event"], entry["reason"]) for entry in logs if entry["log_level"] == "error")

    bounded(hear_from_workers)()
    expected = set()
    if context_tokens > 4096:
        reason = "max_context_tokens here 8192, there 4096"
        expected.add(("a worker has less context than the gateway", reason))
    if weights != "w":
        expected.add(("workers do not match", "weights differs: 'v' here, 'w' there"))
    assert set(logged) == expected and len(logged) == len(expected)
