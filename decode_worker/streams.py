"""News on its way to gateways: one message per engine step, or per several when a gateway reads slowly.

Lives on the asyncio thread. What a slow gateway makes us hold is bounded by its sessions' tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import asdict

from decode_worker.session import Delta
from engine.choice import TokenLogprobs
from protos import decode_pb2


class GatewayStreams:
    """gateway |-> its open Steps stream."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._streams: dict[str, _Stream] = {}

    def is_open(self, gateway: str) -> bool:
        return gateway in self._streams

    async def stream(self, gateway: str) -> AsyncGenerator[decode_pb2.StepEvents, None]:
        """Messages for `gateway`: an empty one at once, then as steps are published. Ends with `close`.

        A second stream of the same name is refused by ValueError.
        """
        if gateway in self._streams:
            raise ValueError(f"gateway {gateway} listens already")
        stream = self._streams[gateway] = _Stream()
        try:
            yield decode_pb2.StepEvents(incarnation=self._incarnation)
            async for step, deltas in stream.batches():
                yield decode_pb2.StepEvents(incarnation=self._incarnation, step=step, deltas=deltas)
        finally:
            del self._streams[gateway]

    def publish(self, step: int, deltas: Iterable[Delta]) -> None:
        """Hand each delta to its gateway's stream; a delta whose gateway is gone is dropped."""
        for delta in deltas:
            stream = self._streams.get(delta.gateway)
            if stream is not None:
                stream.add(step, delta)

    def close(self) -> None:
        """End every stream after what it still holds."""
        for stream in self._streams.values():
            stream.close()


class _Stream:
    def __init__(self) -> None:
        self._pending: dict[int, decode_pb2.SessionDelta] = {}  # handle |-> news not yet sent, joined
        self._step = 0
        self._has_news = asyncio.Event()
        self._is_closed = False

    def add(self, step: int, delta: Delta) -> None:
        message = self._pending.setdefault(
            delta.handle, decode_pb2.SessionDelta(handle=delta.handle, attempt=delta.attempt)
        )
        message.token_ids.extend(delta.token_ids)
        message.logprobs.extend(_told(one) for one in delta.logprobs)
        message.prompt_logprobs.extend(_told(one) for one in delta.prompt_logprobs)
        message.finish_reason = delta.finish_reason
        message.error = delta.error
        if delta.timing is not None:
            message.timing.CopyFrom(decode_pb2.SessionTiming(**asdict(delta.timing)))
        self._step = step
        self._has_news.set()

    def close(self) -> None:
        self._is_closed = True
        self._has_news.set()

    async def batches(self) -> AsyncIterator[tuple[int, list[decode_pb2.SessionDelta]]]:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self._pending:
                deltas, self._pending = list(self._pending.values()), {}
                yield self._step, deltas
            if self._is_closed:
                return


def _told(one: TokenLogprobs) -> decode_pb2.TokenLogprobs:
    return decode_pb2.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)
