"""The queue's limit counts choices: a request comes in with all of them or not at all, and is not refused later."""

import asyncio

import pytest

from gateway.errors import ApiError
from gateway.generation import SharedPrompt
from tests.dispatching import NO_ROOM, Ring, answer, bounded, failure, generation, pair
from tests.fake_workers import FakeDecode

WHOLE = (answer(4), "length")
Choices = list["asyncio.Task[tuple[list[int], str | None]]"]


def start(ring: Ring, name: str, num_choices: int) -> Choices:
    shared = SharedPrompt(num_choices)
    return [ring.start(generation(f"{name}-{number}"), shared) for number in range(num_choices)]


async def answer_all(decode: FakeDecode, tasks: Choices) -> None:
    """One after the other, as there are places."""
    answered = 0
    while not all(task.done() for task in tasks):
        while answered < len(decode.sessions):
            decode.sessions[answered].emit(4, "length")
            answered += 1
        await asyncio.sleep(0.001)
    assert [await task for task in tasks] == [WHOLE] * len(tasks)


@bounded
async def test_choices_that_wait_for_their_leader_count() -> None:
    async with pair(is_manual=True, max_running=1, max_queue=8) as (ring, decode, _prefill):
        first = ring.start(generation("first"))
        await decode.has_sessions(1)
        admitted = start(ring, "a", 5)
        await asyncio.sleep(0)
        assert ring.num_waiting == 5
        for task in start(ring, "b", 4):
            error = await failure(task)
            assert (error.status, error.code, error.retry_after_s) == (429, "overloaded", 1)
            assert "5 requests are waiting, and 4 more exceed --max-queue, which is 8" in error.message
        admitted += start(ring, "c", 3)
        await asyncio.sleep(0)
        assert ring.num_waiting == 8
        assert (await failure(ring.start(generation("d")))).status == 429
        await answer_all(decode, [first, *admitted])


@bounded
async def test_choices_that_have_not_come_yet_count() -> None:
    async with pair(is_manual=True, max_running=1, max_queue=8) as (ring, decode, _prefill):
        first = ring.start(generation("first"))
        await decode.has_sessions(1)
        shared = SharedPrompt(8)
        leader = ring.start(generation("leader"), shared)
        await asyncio.sleep(0)
        assert ring.num_waiting == 8
        assert (await failure(ring.start(generation("one too many")))).status == 429
        leader.cancel()
        await asyncio.wait([leader])
        assert ring.num_waiting == 0
        late = ring.start(generation("late"), shared)
        await answer_all(decode, [first, late])


@bounded
async def test_a_request_with_more_choices_than_the_queue_has_places_is_served_when_nobody_waits() -> None:
    async with pair(is_manual=True, max_running=2, max_queue=2) as (ring, decode, _prefill):
        await answer_all(decode, start(ring, "r", 6))


@bounded
async def test_choices_of_an_admitted_request_are_not_refused_when_the_queue_is_full() -> None:
    """Neither when their leader found no room, nor when it was cancelled."""
    async with pair(is_manual=True, max_running=1, max_queue=4) as (ring, decode, _prefill):
        first = ring.start(generation("first"))
        await decode.has_sessions(1)
        tasks = start(ring, "r", 4)
        await asyncio.sleep(0)
        decode.refusals.append(NO_ROOM)
        decode.sessions[0].emit(4, "length")
        assert await first == WHOLE
        await ring.signal.until(lambda: not decode.refusals)
        assert ring.num_waiting >= 3
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        await answer_all(decode, tasks[1:])


@pytest.mark.parametrize("num_choices", [1, 5])
def test_many_requests_at_once_never_exceed_the_limit(num_choices: int) -> None:
    @bounded
    async def scenario() -> None:
        async with pair(is_manual=True, max_running=1, max_queue=20) as (ring, decode, _prefill):
            first = ring.start(generation("first"))
            await decode.has_sessions(1)
            requests = [start(ring, str(number), num_choices) for number in range(40)]
            await asyncio.sleep(0)
            assert ring.num_waiting == 20
            for request in requests[20 // num_choices :]:
                results = await asyncio.gather(*request, return_exceptions=True)
                assert all(isinstance(result, ApiError) and result.status == 429 for result in results)
            await answer_all(decode, [first, *(task for one in requests[: 20 // num_choices] for task in one)])

    scenario()
