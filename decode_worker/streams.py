"""Updates on their way to gateways: one message per engine step, or per several steps if a gateway reads slowly.

Runs on the asyncio thread. What a slow gateway leaves unread is bounded by its sessions' tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable

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
            while stream.pending or not stream.is_closed:
                await stream.has_updates.wait()
                stream.has_updates.clear()
                if stream.pending:
                    deltas, stream.pending = stream.pending.values(), {}
                    yield decode_pb2.StepEvents(incarnation=self._incarnation, step=stream.step, deltas=deltas)
        finally:
            del self._streams[gateway]

    def publish(self, step: int, updates: Iterable[Update]) -> None:
        """Pass each update to its gateway's stream; drop those whose gateway is gone."""
        for update in updates:
            stream = self._streams.get(update.sequence.params.gateway)
            if stream is not None:
                stream.add(step, update)

    def restart(self, incarnation: str) -> None:
        """End every stream, as `close`; those that come are of this incarnation."""
        self._incarnation = incarnation
        self.close()

    def close(self) -> None:
        """End every stream after what it still holds."""
        for stream in self._streams.values():
            stream.is_closed = True
            stream.has_updates.set()


class _Stream:
    """Updates that are not sent yet."""

    def __init__(self) -> None:
        self.pending: dict[int, decode_pb2.SessionDelta] = {}  # by handle, each one's merged
        self.step = 0  # the newest
        self.has_updates = asyncio.Event()
        self.is_closed = False

    def add(self, step: int, update: Update) -> None:
        params = update.sequence.params
        message = self.pending.get(params.handle)
        if message is None:
            message = decode_pb2.SessionDelta(handle=params.handle, attempt=params.attempt)
            self.pending[params.handle] = message
        message.token_ids.extend(update.token_ids)
        if update.logprobs or update.prompt_logprobs:
            message.logprobs.extend(map(pack_logprobs, update.logprobs))
            message.prompt_logprobs.extend(map(pack_logprobs, update.prompt_logprobs))
        if update.finish_reason:
            message.finish_reason = update.finish_reason
            message.error = update.error
        if update.timing is not None:
            message.timing.CopyFrom(pack_decode_timing(update.timing))
        self.step = step
        self.has_updates.set()
