"""Log-probabilities of a long prompt arrive in one message; reading it must not block the event loop."""

import asyncio

from gateway.router import attempt
from protos import decode_pb2
from wire.logprobs import TokenLogprobs

COUNT = 5000


def messages() -> list[decode_pb2.TokenLogprobs]:
    return [
        decode_pb2.TokenLogprobs(logprob=-number, top_ids=[number], top_logprobs=[-number]) for number in range(COUNT)
    ]


async def count_turns(work: "asyncio.Task[list[TokenLogprobs]]") -> int:
    """The event loop's turns until `work` is done."""
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


def test_others_get_turns_while_a_long_message_is_read_and_nothing_is_lost() -> None:
    async def scenario() -> None:
        reading: asyncio.Task[list[TokenLogprobs]] = asyncio.create_task(attempt._unpack_logprobs(messages()))
        assert await count_turns(reading) >= COUNT // attempt.READ_AT_ONCE
        found = [(one.logprob, one.top_ids, one.top_logprobs) for one in reading.result()]
        assert found == [(-number, (number,), (-number,)) for number in range(COUNT)]

    asyncio.run(scenario())
