"""The order of those that found no room: as they were refused, and before all that are new."""

import asyncio

import pytest

from tests.dispatching import NO_ROOM, answer, bounded, generation, pair
from tests.test_dispatcher import slow_polls

__all__ = ["slow_polls"]  # a fixture


@pytest.mark.usefixtures("slow_polls")
@bounded
async def test_refused_retries_keep_their_order_before_new_requests() -> None:
    async with pair(is_manual=True, max_running=4) as (ring, decode, _prefill):
        running = ring.start(generation("running"))
        await decode.has_sessions(1)
        decode.refusals.extend([NO_ROOM] * 3)
        decode.may_answer.clear()
        refused = []
        for number in range(3):
            refused.append(ring.start(generation(f"refused-{number}")))
            await ring.signal.until(lambda number=number: decode.num_reserve_calls == 2 + number)  # type: ignore[misc]
        fresh = [ring.start(generation(f"new-{number}")) for number in range(2)]
        await asyncio.sleep(0)
        assert ring.num_waiting == 2
        decode.may_answer.set()
        (link,) = ring.fleet.decode.values()
        while ring.num_waiting < 5:
            await link._ask_status()  # as long as the refusals take to arrive
        decode.is_manual = False
        decode.sessions[0].emit(4, "length")  # a place and its pages are free again
        for task in (running, *refused, *fresh):
            assert await task == (answer(4), "length")
        names = [session.request.request_id for session in decode.sessions]
        assert names == ["running", "refused-0", "refused-1", "refused-2", "new-0", "new-1"]
