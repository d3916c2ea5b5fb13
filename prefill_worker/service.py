"""The Prefill service: one Run call is one prompt, from admission to the last acknowledged offer.

Runs on the asyncio thread; decides nothing.
"""

import asyncio
import time
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import partial

import grpc
import structlog

from prefill_worker.kv_sender import KVSender, OfferFailedError
from prefill_worker.loans import Borrower, Lender, LoanRefusedError
from prefill_worker.metrics import PrefillMetrics
from protos import prefill_pb2, prefill_pb2_grpc, worker_pb2
from runtime.config import PrefillConfig
from runtime.peer_input import find_too_many_logprobs
from wire.messages import pack_logprobs, unpack_images
from wire.page_keys import TOKEN_BYTES
from worker.process import Worker
from worker.sequences import Sequence, SequenceParams, Update
from worker.status import Context, WorkerService
from worker.thread import EngineThread

log = structlog.get_logger()


class PrefillService(WorkerService, prefill_pb2_grpc.PrefillServicer):
    """Calls that change the scheduler hold the engine thread's lock for microseconds; others read without it."""

    def __init__(
        self, worker: Worker, config: PrefillConfig, thread: EngineThread, sender: KVSender, lender: Lender,
        borrower: Borrower, metrics: PrefillMetrics,
    ) -> None:  # fmt: skip
        super().__init__(worker, thread, lambda: sender.transports() | borrower.peers.transports(), metrics)
        self._sender = sender
        self._lender = lender
        self._borrower = borrower
        self._metrics = metrics
        self._heartbeat_s = config.heartbeat_s
        self._stall_s = config.stall_s
        self._updates: dict[int, asyncio.Queue[Update]] = {}  # sequence id |-> updates for its Run call

    def on_updates(self, updates: Seq[Update]) -> None:
        """Distribute a step's updates. Called on the asyncio thread."""
        for update in updates:
            if (queue := self._updates.get(update.sequence.id)) is not None:
                queue.put_nowait(update)

    async def Run(self, request: prefill_pb2.RunRequest, context: Context) -> prefill_pb2.RunResponse:
        problem = self._find_problem(request)
        if problem is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        await self.check_draining(context)
        num_logprobs = request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None
        try:
            params = SequenceParams(
                request.request_id, request.prompt, request.ticket.end, 0, request.cache_salt, request.ticket.adapter,
                num_logprobs, images=unpack_images(request.images),
            )  # fmt: skip
            self.check_images(params)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        keys = self._scheduler.kv.keys_of(params)
        borrow = partial(self._borrower.borrow, request.source, keys) if request.HasField("source") else None
        try:
            while num_logprobs is None and not await self.tiers.restore(keys, self._heartbeat_s, borrow):
                await self._sender.renew(request.ticket)
            while (
                encoded := await self.encode_images(params, request.images, keys, self._heartbeat_s, context)
            ) is None:
                await self._sender.renew(request.ticket)
        except OfferFailedError as failure:
            await context.abort(failure.code, str(failure))
        sequence = await self.admit(encoded, keys, context, is_kept=True)
        self._updates[sequence.id] = asyncio.Queue()
        try:
            return await self._hand_over(request, sequence)
        except OfferFailedError as failure:
            await context.abort(failure.code, str(failure))
        except asyncio.CancelledError:
            self._metrics.cancelled.labels("prefill" if sequence.computed < params.end else "transfer").inc()
            log.info("prefill cancelled", request_id=request.request_id)
            raise
        finally:
            del self._updates[sequence.id]
            with self._thread.lock:
                self._scheduler.end(sequence)
                self._thread.wake()

    async def Lend(self, request: prefill_pb2.LendRequest, context: Context) -> prefill_pb2.LendResponse:
        try:
            return await self._lender.lend(request)
        except LoanRefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def add_to_status(self, status: worker_pb2.WorkerStatus) -> None:
        status.restored_tokens += self._borrower.reading.num_tokens

    def _find_problem(self, request: prefill_pb2.RunRequest) -> str | None:
        ticket, num_prompt = request.ticket, len(request.prompt) // TOKEN_BYTES
        if not 0 <= ticket.begin < ticket.end < num_prompt <= self._context_tokens:
            return (
                f"positions [{ticket.begin}, {ticket.end}) of a prompt of {num_prompt} tokens are wanted; "
                f"they must be part of it, and at most {self._context_tokens} tokens fit the context"
            )
        if ticket.begin % self._scheduler.kv.page_tokens:
            return f"begin {ticket.begin} is not on a page border ({self._scheduler.kv.page_tokens} tokens a page)"
        return find_too_many_logprobs("num_prompt_logprobs", request.num_prompt_logprobs) or self.find_bad_prompt(
            request.prompt
        )

    async def _hand_over(self, request: prefill_pb2.RunRequest, sequence: Sequence) -> prefill_pb2.RunResponse:
        """Offer the sequence's pages as they are computed; returns after the last acknowledgement."""
        offered, end = request.ticket.begin, request.ticket.end
        num_scores = end if request.HasField("num_prompt_logprobs") else 0
        result = prefill_pb2.RunResponse(cached_tokens=sequence.num_cached)
        heard_at = time.monotonic()  # the last sign of life sent to the decode worker
        while offered < end or len(result.prompt_logprobs) < num_scores:
            positions = self._scheduler.kv.next_offer(sequence, offered)
            if positions is not None:
                pages = self._scheduler.kv.pages_of(sequence, positions)
                slots = self._scheduler.kv.states_of(sequence, positions)
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
