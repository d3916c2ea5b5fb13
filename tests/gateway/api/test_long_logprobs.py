"""Log-probabilities of a long prompt arrive in one message; reading it must not block the event loop."""

import asyncio

from gateway.ring import attempt
from protos import decode_pb2, prefill_pb2

COUNT = 5000


def messages() -> list[decode_pb2.TokenLogprobs]:
    return [
        decode_pb2.TokenLogprobs(logprob=-number, top_ids=[number], top_logprobs=[-number]) for number in range(COUNT)
    ]


async def count_turns(work: "asyncio.Task[object]") -> int:
    """The event loop's turns until `work` is done."""
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


def test_others_get_turns_while_a_long_message_is_read() -> None:
    async def scenario() -> None:
        prefilled = prefill_pb2.RunResponse(prompt_logprobs=messages())
        reading: asyncio.Task[object] = asyncio.create_task(attempt._logprobs(prefilled.prompt_logprobs))
        assert await count_turns(reading) >= COUNT // attempt._READ_AT_ONCE
        delta = decode_pb2.SessionDelta(logprobs=messages(), prompt_logprobs=messages())
        reading = asyncio.create_task(attempt._update(delta))
        assert await count_turns(reading) >= 2 * (COUNT // attempt._READ_AT_ONCE)

    asyncio.run(scenario())


def test_nothing_is_lost_or_changed_in_between() -> None:
    async def scenario() -> None:
        told = [(one.logprob, one.top_ids, one.top_logprobs) for one in await attempt._logprobs(messages())]
        assert told == [(-number, (number,), (-number,)) for number in range(COUNT)]

    asyncio.run(scenario())
