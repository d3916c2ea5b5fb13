"""A draining gateway admits nothing new; admitted requests finish, or end with a reason."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from gateway.errors import ApiError
from gateway.ring.door import CUT_OFF, DRAINING
from runtime.lifecycle import Shutdown
from tests.support.dispatching import Ring, answer, bounded, failure, generation, pair
from tests.support.fake_workers import PATIENCE_S, FakeDecode


@asynccontextmanager
async def draining(drain_s: float = PATIENCE_S) -> AsyncIterator[tuple[Ring, FakeDecode, Shutdown]]:
    """Wired as in gateway/main.py. The test gives the answers."""
    async with pair(is_manual=True) as (ring, decode, _prefill):
        door = ring.dispatcher.door
        shutdown = Shutdown(drain_s, lambda: len(door))
        door.is_draining, door.on_empty = lambda: shutdown.is_draining, shutdown.look_soon
        yield ring, decode, shutdown
        assert len(door) == 0


@bounded
async def test_an_idle_process_drains_at_once() -> None:
    async with draining() as (ring, _decode, shutdown):
        waiting = asyncio.create_task(shutdown.wait())
        await asyncio.sleep(0)
        assert not waiting.done() and ring.dispatcher.check_ready() is None
        shutdown.begin("test")
        shutdown.begin("twice is once")
        await waiting
        assert ring.dispatcher.check_ready() == DRAINING


@bounded
async def test_what_is_inside_ends_first_and_nothing_new_comes_in() -> None:
    async with draining() as (ring, decode, shutdown):
        inside = ring.start(generation())
        await decode.has_sessions(1)
        shutdown.begin("test")
        refusal = await failure(ring.start(generation()))
        assert (refusal.status, refusal.message) == (503, DRAINING)
        assert refusal.retry_after_s
        decode.sessions[0].emit(4, "length")
        await shutdown.wait()
        assert await inside == (answer(4), "length")


@bounded
async def test_what_is_still_inside_ends_with_the_reason() -> None:
    async with draining(drain_s=0.05) as (ring, decode, shutdown):
        with ring.dispatcher.admit(1) as admitted:
            async with aclosing(ring.dispatcher.generate(generation(), admitted)) as stream:
                first = asyncio.ensure_future(anext(stream))
                await decode.has_sessions(1)
                decode.sessions[0].emit(2)
                assert list((await first).token_ids) == answer(2)
                rest = asyncio.ensure_future(anext(stream))
                shutdown.begin("test")
                await shutdown.wait()
                assert len(ring.dispatcher.door) == 1, "the drain's time is over, the request is still inside"
                ring.dispatcher.door.cut_off()
                end = await failure(rest)
                assert (end.status, end.message) == (503, CUT_OFF)
        await ring.signal.until(lambda: decode.aborted == {decode.sessions[0].request.handle})


@bounded
async def test_a_request_in_the_queue_is_cut_off_too() -> None:
    async with pair(is_manual=True, max_running=1) as (ring, decode, _prefill):
        running, waiting = ring.start(generation("running")), ring.start(generation("waiting"))
        await decode.has_sessions(1)
        ring.dispatcher.door.cut_off()
        for task in (running, waiting):
            assert (await failure(task)).message == CUT_OFF


@bounded
async def test_a_slow_client_is_not_interrupted_while_it_takes_tokens() -> None:
    """The cut comes when the client reads on, not in the middle of a message."""
    async with draining() as (ring, decode, _shutdown):
        with ring.dispatcher.admit(1) as admitted:
            async with aclosing(ring.dispatcher.generate(generation(), admitted)) as stream:
                first = asyncio.ensure_future(anext(stream))
                await decode.has_sessions(1)
                decode.sessions[0].emit(1)
                await first
                ring.dispatcher.door.cut_off()
                await asyncio.sleep(0.01)
                with pytest.raises(ApiError, match="before the answer was complete"):
                    await anext(stream)
        await ring.signal.until(lambda: decode.aborted == {decode.sessions[0].request.handle})


@bounded
async def test_a_client_that_leaves_at_the_same_moment_stays_cancelled() -> None:
    async with draining() as (ring, decode, _shutdown):
        inside = ring.start(generation())
        await decode.has_sessions(1)
        inside.cancel()
        ring.dispatcher.door.cut_off()
        with pytest.raises(asyncio.CancelledError):
            await inside
