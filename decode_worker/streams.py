"""Updates on their way to gateways: one message per engine step, or per several steps if a gateway reads slowly.

Runs on the asyncio thread. What a slow gateway leaves unread is bounded by its sessions' tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

from protos import decode_pb2
from wire.messages import pack_decode_timing, pack_logprobs
from worker.sequences import Update


class GatewayStreams:
    """gateway |-> its open Steps stream."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._streams: dict[str, _Stream] = {}

    def is_open(self, gateway: str) -> bool:
        return gateway in self._streams

    async def stream(self, gateway: str) -> AsyncGenerator[decode_pb2.StepEvents, None]:
        """Messages for `gateway`, which has no stream yet: an empty one at once, then one per published step.

        Ends with `close`.
        """
        stream = self._streams[gateway] = _Stream()
        try:
            yield decode_pb2.StepEvents(incarnation=self._incarnation)
            async for step, deltas in stream.batches():
                yield decode_pb2.StepEvents(incarnation=self._incarnation, step=step, deltas=deltas)
        finally:
            del self._streams[gateway]

    def publish(self, step: int, updates: Iterable[Update]) -> None:
        """Pass each update to its gateway's stream; drop those whose gateway is gone."""
        for update in updates:
            stream = self._streams.get(update.sequence.params.gateway)
            if stream is not None:
                stream.add(step, update)

    def close(self) -> None:
        """End every stream after what it still holds."""
        for stream in self._streams.values():
            stream.close()


class _Stream:
    def __init__(self) -> None:
        self._pending: dict[int, decode_pb2.SessionDelta] = {}  # handle |-> unsent updates, merged
        self._step = 0
        self._has_updates = asyncio.Event()
        self._is_closed = False

    def add(self, step: int, update: Update) -> None:
        params = update.sequence.params
        message = self._pending.get(params.handle)
        if message is None:
            message = self._pending[params.handle] = decode_pb2.SessionDelta(
                handle=params.handle, attempt=params.attempt
            )
        message.token_ids.extend(update.token_ids)
        if update.logprobs or update.prompt_logprobs:
            message.logprobs.extend(map(pack_logprobs, update.logprobs))
            message.prompt_logprobs.extend(map(pack_logprobs, update.prompt_logprobs))
        if update.finish_reason:
            message.finish_reason = update.finish_reason
            message.error = update.error
        if update.timing is not None:
            message.timing.CopyFrom(pack_decode_timing(update.timing))
        self._step = step
        self._has_updates.set()

    def close(self) -> None:
        self._is_closed = True
        self._has_updates.set()

    async def batches(self) -> AsyncIterator[tuple[int, list[decode_pb2.SessionDelta]]]:
        while True:
            await self._has_updates.wait()
            self._has_updates.clear()
            if self._pending:
                deltas, self._pending = list(self._pending.values()), {}
                yield self._step, deltas
            if self._is_closed:
                return
