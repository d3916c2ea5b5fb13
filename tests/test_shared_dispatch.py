"""Requests that share a prompt between gateway and workers, with fake workers behind real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from gateway.generation import SharedPrompt
from tests.dispatching import NO_ROOM, PROMPT, Ring, answer, bounded, failure, generation, pair, ring
from tests.fake_workers import PATIENCE_S, FakeDecode, FakePrefill, Refusal, Signal, serving

WHOLE = (answer(4), "length")


@asynccontextmanager
async def two_decodes(
    max_running: int = 4,
) -> AsyncIterator[tuple[Ring, list[FakeDecode], FakePrefill, list[AsyncExitStack]]]:
    """A ring with two decode workers whose sessions the test speaks for; the stacks hold these workers' servers."""
    signal = Signal()
    workers = [FakeDecode(name, signal, max_running, is_manual=True) for name in ("D1", "D2")]
    prefill = FakePrefill("P1", signal)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(AsyncExitStack()) for _ in workers]
        addresses = [
            await server.enter_async_context(serving(worker)) for server, worker in zip(servers, workers, strict=True)
        ]
        prefill_address = await stack.enter_async_context(serving(prefill))
        built = await stack.enter_async_context(ring(signal, addresses, [prefill_address], patience_s=PATIENCE_S))
        yield built, workers, prefill, servers


def find_leader(workers: list[FakeDecode]) -> tuple[FakeDecode, FakeDecode]:
    """The worker that has a session, and the other one."""
    (leader,) = [worker for worker in workers if worker.sessions]
    return leader, workers[1 - workers.index(leader)]


@bounded
async def test_followers_wait_for_the_leaders_session_and_are_placed_beside_it() -> None:
    async with two_decodes() as (ring, workers, prefill, _servers):
        for worker in workers:
            worker.may_answer.clear()
        shared = SharedPrompt()
        tasks = [ring.start(generation(f"r{number}"), shared) for number in range(3)]
        await ring.signal.until(lambda: sum(worker.num_reserve_calls for worker in workers) == 1)
        for link in ring.fleet.decode.values():
            await link._ask_status()  # time in which a call would show
        assert (sum(worker.num_reserve_calls for worker in workers), ring.num_waiting) == (1, 2)
        for worker in workers:
            worker.may_answer.set()
        await ring.signal.until(lambda: sum(len(worker.sessions) for worker in workers) == 3)
        beside, other = find_leader(workers)
        assert not other.sessions
        leader, *followers = [session.request for session in beside.sessions]
        assert leader.share_with == 0 and [one.share_with for one in followers] == [leader.handle] * 2
        assert all(list(one.prompt_ids) == list(PROMPT) for one in followers)
        await ring.signal.until(lambda: prefill.num_done == 1)
        for session in beside.sessions:
            session.emit(4, "length")
        assert [await task for task in tasks] == [WHOLE] * 3
        assert len(prefill.runs) == 1


@bounded
async def test_followers_that_come_when_the_leader_is_gone_are_on_their_own() -> None:
    async with pair() as (ring, decode, _prefill):
        shared = SharedPrompt()
        assert await ring.collect(generation("r0"), shared) == WHOLE
        assert await ring.collect(generation("r1"), shared) == WHOLE
        assert [session.request.share_with for session in decode.sessions] == [0, 0]


@pytest.mark.parametrize("refusal", [NO_ROOM, (grpc.StatusCode.INTERNAL, "no")], ids=["no room", "failed"])
def test_followers_of_a_leader_that_was_refused_wait_for_its_next_session(refusal: Refusal) -> None:
    @bounded
    async def scenario() -> None:
        async with pair(is_manual=True, max_queue=2) as (ring, decode, prefill):
            decode.refusals.append(refusal)
            shared = SharedPrompt(3)
            tasks = [ring.start(generation(f"r{number}"), shared) for number in range(3)]
            await decode.has_sessions(3)
            leader = decode.sessions[0].request
            assert (leader.request_id, leader.attempt) == ("r0", 2)
            assert [one.request.share_with for one in decode.sessions] == [0, leader.handle, leader.handle]
            await ring.signal.until(lambda: prefill.num_done == 1)
            for session in decode.sessions:
                session.emit(4, "length")
            assert [await task for task in tasks] == [WHOLE] * 3
            assert len(prefill.runs) == 1

    scenario()


@bounded
async def test_followers_end_when_their_leader_fails_for_good() -> None:
    """Each is then on its own, and no attempt of its own has failed yet."""
    async with pair(is_manual=True) as (ring, decode, _prefill):
        decode.refusals.extend([(grpc.StatusCode.INTERNAL, "no")] * 3)
        shared = SharedPrompt(2)
        leader, follower = (ring.start(generation(name), shared) for name in ("leader", "follower"))
        assert (await failure(leader)).status == 503
        await decode.has_sessions(1)
        assert (decode.sessions[0].request.request_id, decode.sessions[0].request.share_with) == ("follower", 0)
        decode.sessions[0].emit(4, "length")
        assert await follower == WHOLE


@pytest.mark.parametrize("stage", ["queue", "reserve"])
def test_followers_of_a_leader_cancelled_before_it_has_a_session_are_on_their_own(stage: str) -> None:
    @bounded
    async def scenario() -> None:
        async with pair(is_manual=True, max_running=1) as (ring, decode, _prefill):
            if stage == "queue":
                first = ring.start(generation("first"))
                await decode.has_sessions(1)
            else:
                decode.may_answer.clear()
            shared = SharedPrompt()
            leader = ring.start(generation("leader"), shared)
            follower = ring.start(generation("follower"), shared)
            await ring.signal.until(lambda: decode.num_reserve_calls == 1)
            await asyncio.sleep(0)
            assert ring.num_waiting == 1 + (stage == "queue")
            leader.cancel()
            await asyncio.wait([leader])
            decode.may_answer.set()
            if stage == "queue":
                decode.sessions[0].emit(4, "length")
                assert await first == WHOLE
            await ring.signal.until(lambda: "follower" in [one.request.request_id for one in decode.sessions])
            assert decode.sessions[-1].request.share_with == 0
            decode.sessions[-1].emit(4, "length")
            assert await follower == WHOLE

    scenario()


@pytest.mark.parametrize("answered", ["NOT_FOUND", "expired"])
def test_a_follower_whose_leader_was_cancelled_afterwards_goes_alone(answered: str) -> None:
    @bounded
    async def scenario() -> None:
        async with pair(is_manual=True) as (ring, decode, _prefill):
            shared = SharedPrompt()
            leader = ring.start(generation("leader"), shared)
            await decode.has_sessions(1)
            if answered == "NOT_FOUND":
                decode.refusals.append((grpc.StatusCode.NOT_FOUND, "no such session"))
            follower = ring.start(generation("follower"), shared)
            if answered == "expired":
                await decode.has_sessions(2)
                assert decode.sessions[1].request.share_with == decode.sessions[0].request.handle
            leader.cancel()
            await asyncio.wait([leader])
            if answered == "expired":
                decode.sessions[1].say([], "expired", "the session whose prompt it shares ended")
            await ring.signal.until(lambda: decode.num_reserve_calls == 3)
            await ring.signal.until(lambda: decode.sessions[-1].request.attempt == 2)
            assert decode.sessions[-1].request.share_with == 0
            decode.sessions[-1].emit(4, "length")
            assert await follower == WHOLE
            assert not ring.num_failed_attempts  # nobody is to blame

    scenario()


@bounded
async def test_a_follower_goes_on_after_its_leader_has_ended() -> None:
    async with pair(is_manual=True) as (ring, decode, _prefill):
        shared = SharedPrompt()
        tasks = [ring.start(generation(f"r{number}"), shared) for number in range(2)]
        await decode.has_sessions(2)
        decode.sessions[1].emit(2)
        decode.sessions[0].emit(4, "length")
        assert await tasks[0] == WHOLE
        decode.sessions[1].emit(2, "length")
        assert await tasks[1] == WHOLE
        assert not decode.aborted


@bounded
async def test_a_follower_waits_for_room_beside_its_leader() -> None:
    async with two_decodes(max_running=1) as (ring, workers, _prefill, _servers):
        shared = SharedPrompt()
        tasks = [ring.start(generation(f"r{number}"), shared) for number in range(2)]
        await ring.signal.until(lambda: any(worker.sessions for worker in workers) and ring.num_waiting == 1)
        beside, other = find_leader(workers)
        beside.sessions[0].emit(4, "length")
        assert await tasks[0] == WHOLE
        await beside.has_sessions(2)
        beside.sessions[1].emit(4, "length")
        assert await tasks[1] == WHOLE and not other.sessions


@bounded
async def test_a_follower_is_not_refused_by_a_full_queue() -> None:
    """It came with its leader, which was admitted; refusing it would end a request that streams already."""
    async with pair(is_manual=True, max_running=1, max_queue=1) as (ring, decode, _prefill):
        shared = SharedPrompt()
        leader = ring.start(generation("leader"), shared)
        await decode.has_sessions(1)
        other = ring.start(generation("other"))
        await ring.signal.until(lambda: ring.num_waiting == 1)
        follower = ring.start(generation("follower"), shared)
        for number, task in enumerate((leader, other, follower)):
            await decode.has_sessions(number + 1)
            decode.sessions[number].emit(4, "length")
            assert await task == WHOLE


@bounded
async def test_a_follower_that_waits_beside_its_leader_lets_others_pass_to_other_workers() -> None:
    async with two_decodes(max_running=1) as (ring, workers, _prefill, _servers):
        shared = SharedPrompt()
        tasks = [ring.start(generation(f"r{number}"), shared) for number in range(3)]
        await ring.signal.until(lambda: any(worker.sessions for worker in workers) and ring.num_waiting == 2)
        beside, other = find_leader(workers)
        passing, last = ring.start(generation("passes")), ring.start(generation("waits"))
        await other.has_sessions(1)
        assert ring.num_waiting == 3
        other.sessions[0].emit(4, "length")
        assert await passing == WHOLE
        await other.has_sessions(2)
        other.sessions[1].emit(4, "length")
        assert await last == WHOLE
        for number, task in enumerate(tasks):
            await beside.has_sessions(number + 1)
            beside.sessions[number].emit(4, "length")
            assert await task == WHOLE
        assert len(other.sessions) == 2


@pytest.mark.parametrize("is_begun", [False, True])
def test_followers_and_leader_of_a_decode_worker_that_died_go_on_elsewhere_alone(is_begun: bool) -> None:
    @bounded
    async def scenario() -> None:
        async with two_decodes() as (ring, workers, _prefill, servers):
            shared = SharedPrompt()
            tasks = [ring.start(generation(f"r{number}"), shared) for number in range(3)]
            await ring.signal.until(lambda: sum(len(worker.sessions) for worker in workers) == 3)
            dead, other = find_leader(workers)
            if is_begun:
                links = [link for link in ring.fleet.decode.values() if link.num_mine]
                for session in dead.sessions:
                    session.emit(1)
                remotes = list(links[0]._sessions.values())
                await ring.signal.until(lambda: all(one.inbox.empty() for one in remotes))
            await servers[workers.index(dead)].aclose()
            await other.has_sessions(3)
            for session in other.sessions:
                assert (session.request.share_with, session.request.attempt) == (0, 2)
                session.emit(session.request.max_tokens, "length")
            assert [await task for task in tasks] == [WHOLE] * 3

    scenario()


@bounded
async def test_choices_that_come_and_go_leave_nothing_behind() -> None:
    """Refusals, cancellations and ends at once; `ring` checks that all places are free afterwards."""
    async with pair(max_running=3, max_queue=200) as (ring, decode, prefill):
        decode.refusals.extend([(grpc.StatusCode.NOT_FOUND, "gone"), (grpc.StatusCode.INTERNAL, "no")] * 5)
        prefill.refusals.extend([(grpc.StatusCode.ABORTED, "refused")] * 5)
        tasks = []
        for group in range(12):
            shared = SharedPrompt()
            tasks += [ring.start(generation(f"r{group}-{number}"), shared) for number in range(group % 5 + 1)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[::3])
        rest = [result for number, result in enumerate(results) if number % 3]
        assert sum(result == WHOLE for result in rest) > len(rest) // 2
