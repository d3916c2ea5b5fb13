"""Hands prompts over to decode workers: offers each one's pages as they are computed. On the asyncio thread."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import TypeVar

import grpc
import structlog

from prefill_worker.kv_sender import KVSender, OfferFailedError
from prefill_worker.metrics import PrefillMetrics
from protos import kv_pb2, prefill_pb2
from runtime.config_parts import HeartbeatConfig
from wire.messages import pack_logprobs, pack_read
from worker.kv_cache import KVCacheManager
from worker.receiving import next_offer
from worker.sequences import Sequence, Update
from worker.thread import EngineThread

T = TypeVar("T")
log = structlog.get_logger()


class HandOvers:
    """Owns what steps report for each running one."""

    def __init__(
        self, config: HeartbeatConfig, kv: KVCacheManager, thread: EngineThread, sender: KVSender,
        metrics: PrefillMetrics,
    ) -> None:  # fmt: skip
        self._kv = kv
        self._thread = thread
        self._sender = sender
        self._metrics = metrics
        self._heartbeat_s = config.heartbeat_s
        self._stall_s = config.stall_s
        self._updates: dict[int, asyncio.Queue[Update]] = {}  # sequence id |-> its updates

    def on_updates(self, updates: Seq[Update]) -> None:
        """Distribute a step's updates."""
        for update in updates:
            if (queue := self._updates.get(update.sequence.id)) is not None:
                queue.put_nowait(update)

    async def wait(self, ticket: kv_pb2.Ticket, ask: Callable[[], Awaitable[T | None]]) -> T:
        """Ask until there is an answer, and renew the session's lease meanwhile. Raises OfferFailedError."""
        while not (answer := await ask()):
            await self._sender.renew(ticket)
        return answer

    async def run(self, request: prefill_pb2.RunRequest, sequence: Sequence) -> prefill_pb2.RunResponse:
        """Returns after the last acknowledgement. Raises OfferFailedError."""
        self._updates[sequence.id] = asyncio.Queue()
        try:
            return await self._offer(request, sequence)
        finally:
            del self._updates[sequence.id]

    async def _offer(self, request: prefill_pb2.RunRequest, sequence: Sequence) -> prefill_pb2.RunResponse:
        """Offer the sequence's pages as they are computed; returns after the last acknowledgement."""
        offered, end = request.ticket.begin, request.ticket.end
        num_scores = end if request.HasField("num_prompt_logprobs") else 0
        read = pack_read(sequence.read_tokens)
        result = prefill_pb2.RunResponse(cached_tokens=sequence.num_cached, read_tokens=read)
        heard_at = time.monotonic()  # the last sign of life sent to the decode worker
        while offered < end or len(result.prompt_logprobs) < num_scores:
            factor = self._sender.offer_factor(request.ticket.address)
            positions = next_offer(self._kv, sequence, offered, factor)
            if positions is not None:
                pages = self._kv.pages_of(sequence, positions)
                slots = self._kv.states.offered(sequence, positions)
                await self._sender.send(request, positions, pages, slots, result)
                offered, heard_at = positions.stop, time.monotonic()
            elif (seconds_left := heard_at + self._heartbeat_s - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    # not wait_for: before Python 3.12 it swallows a cancellation that arrives with the update
                    async with asyncio.timeout(seconds_left):
                        _take(await self._updates[sequence.id].get(), result)
            else:
                if self._thread.progress().find_stuck(self._stall_s) is None:  # if the engine hangs, the lease expires
                    await self._sender.renew(request.ticket)
                heard_at = time.monotonic()
        result.queue_seconds = (sequence.started_at or sequence.admitted_at) - sequence.admitted_at
        result.prefill_seconds = sequence.timing(time.monotonic()).prefill_s - result.queue_seconds
        self._metrics.queue_seconds.observe(result.queue_seconds)
        self._metrics.prefill_seconds.observe(result.prefill_seconds)
        log.info(
            "prefilled", request_id=request.request_id, tokens=end, cached=sequence.num_cached,
            bytes=result.transfer_bytes,
        )  # fmt: skip
        return result


def _take(update: Update, result: prefill_pb2.RunResponse) -> None:
    """Raises OfferFailedError if the sequence's step failed."""
    if update.error:
        raise OfferFailedError(grpc.StatusCode.INTERNAL, update.error)
    result.prompt_logprobs.extend(map(pack_logprobs, update.prompt_logprobs))
