"""Updates for gateways: always in order, one message each if the gateway keeps up, merged if it does not."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decode_worker.streams import GatewayStreams
from protos import decode_pb2
from tests.support.real_workers import packed
from wire.logprobs import TokenLogprobs
from wire.timing import Timing
from worker.kv_cache import KVCacheManager
from worker.params import SequenceParams
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import Update

PATIENCE_S = 30.0


def update(handle: int, *tokens: int, gateway: str = "g", finish: str = "", error: str = "", **more: Any) -> Update:
    scheduler = Scheduler(KVCacheManager(PrefixCache(1, [0]), 16), max_running=1, lease_s=1.0)
    sequence = scheduler.admit(SequenceParams("r", packed([1, 2]), 1, 8, gateway=gateway, handle=handle), 0.0)
    return Update(sequence, tokens, finish, error, **more)


def content(events: decode_pb2.StepEvents) -> list[tuple[int, list[int], str]]:
    return [(news.handle, list(news.token_ids), news.finish_reason) for news in events.deltas]


async def read(stream: AsyncIterator[decode_pb2.StepEvents]) -> decode_pb2.StepEvents:
    return await asyncio.wait_for(anext(stream), PATIENCE_S)


async def open_stream(streams: GatewayStreams, gateway: str = "g") -> AsyncIterator[decode_pb2.StepEvents]:
    """A stream after its first, empty message."""
    stream = streams.stream(gateway)
    first = await read(stream)
    assert first.incarnation == "D1" and not first.deltas
    return stream


async def test_updates_are_joined_only_while_a_gateway_is_slow() -> None:
    streams = GatewayStreams("D1")
    stream = await open_stream(streams)
    for step in range(3):
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        streams.publish(step, [update(1, 10 + step), update(2, 20 + step)])
        events = await reading
        assert (events.incarnation, events.step) == ("D1", step)
        assert content(events) == [(1, [10 + step], ""), (2, [20 + step], "")]
    scores = [TokenLogprobs(-float(number), (number, 9), (-0.5, -1.0)) for number in range(5)]
    streams.publish(3, [update(1, prompt_logprobs=scores[:2])])
    streams.publish(4, [update(1, 10, 11, logprobs=scores[2:4]), update(2, 500)])
    timing = Timing(prefill_s=1.0, first_step_s=2.0, decode_s=3.0, cached_tokens=16, steps=2, preemptions=1)
    last = update(1, 12, finish="length", logprobs=scores[4:], timing=timing)
    streams.publish(5, [last, update(2, finish="error", error="why")])
    events = await read(stream)
    assert events.step == 5 and content(events) == [(1, [10, 11, 12], "length"), (2, [500], "error")]
    news, failed = events.deltas
    assert failed.error == "why" and [one.logprob for one in news.prompt_logprobs] == [0, -1]
    assert [(one.logprob, list(one.top_ids), list(one.top_logprobs)) for one in news.logprobs] == [
        (-number, [number, 9], [-0.5, -1.0]) for number in (2, 3, 4)
    ]
    assert (news.timing.kv_seconds, news.timing.first_step_seconds, news.timing.decode_seconds) == (1, 2, 3)
    assert (news.timing.steps, news.timing.preemptions, news.timing.cached_tokens) == (2, 1, 16)
    streams.publish(6, [update(3, 1)])
    assert content(await read(stream)) == [(3, [1], "")], "a sent update is not sent again"


async def test_gateways_get_updates_of_their_own_sessions_and_may_leave_and_return() -> None:
    streams = GatewayStreams("D1")
    ours, theirs = await open_stream(streams, "g"), await open_stream(streams, "h")
    streams.publish(1, [update(1, 10), update(1, 20, gateway="h"), update(1, 30, gateway="gone")])
    assert content(await read(ours)) == [(1, [10], "")]
    assert content(await read(theirs)) == [(1, [20], "")]
    reading = asyncio.create_task(read(ours))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading], timeout=PATIENCE_S)
    assert not streams.is_open("g")
    streams.publish(1, [update(1, 10)])  # no listener: dropped
    again = await open_stream(streams)
    streams.publish(2, [update(1, 11)])
    assert content(await read(again)) == [(1, [11], "")]


async def test_close_sends_what_is_left_and_ends() -> None:
    streams = GatewayStreams("D1")
    full, empty = await open_stream(streams, "g"), await open_stream(streams, "h")
    streams.publish(1, [update(1, 9)])
    assert content(await read(full)) == [(1, [9], "")]
    streams.publish(1, [update(1, 10, finish="stop")])
    streams.close()
    assert content(await read(full)) == [(1, [10], "stop")]
    for stream in (full, empty):
        with pytest.raises(StopAsyncIteration):
            await read(stream)
    assert not streams.is_open("g") and not streams.is_open("h")
