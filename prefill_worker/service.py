"""The Prefill service: one Run call is one prompt, from admission to the last acknowledged offer.

Lives on the asyncio thread; decides nothing.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from engine.kvcache.allocator import NeverFitsError, NoRoomError
from engine.thread import EngineThread
from prefill_worker.batching import Planned
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.offers import OfferFailedError, Offers
from prefill_worker.run_table import PrefillRun, RunTable
from protos import decode_pb2, kv_pb2, prefill_pb2, prefill_pb2_grpc
from runtime import rpc
from runtime.lifecycle import Shutdown
from runtime.peer_input import find_foreign_token, find_too_many_logprobs

Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger()


@dataclass(slots=True)
class _Watch:
    """What a Run call knows of its run's steps. Set by `on_step`, read by the call."""

    created: float = field(default_factory=time.monotonic)
    started: float = 0.0  # begin of the first step
    ended: float = 0.0  # end of the latest step
    error: Exception | None = None
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Every call that changes the table holds the engine thread's lock, for microseconds; others read without it."""

    def __init__(
        self,
        me: kv_pb2.Peer,
        table: RunTable,
        thread: EngineThread,
        offers: Offers,
        metrics: PrefillMetrics,
        context_tokens: int,
        vocab_size: int,
        heartbeat_s: float,
        stall_s: float,
        shutdown: Shutdown,
    ) -> None:
        """`heartbeat_s`: how often a decode worker hears that its session is still worked for;
        `stall_s`: an engine step that takes longer is stuck, and the session's lease may end.
        """
        self._me = me
        self._table = table
        self._thread = thread
        self._offers = offers
        self._metrics = metrics
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s
        self._watches: dict[int, _Watch] = {}  # run id |-> its watch
        self._shutdown = shutdown

    def on_step(self, planned: list[Planned], started: float, error: Exception | None) -> None:
        """A step that began at `started` is over. Called on the asyncio thread."""
        now = time.monotonic()
        for step in planned:
            watch = self._watches.get(step.run.id)
            if watch is not None:
                watch.started = watch.started or started
                watch.ended = now
                watch.error = error
                watch.has_news.set()

    async def Run(  # noqa: N802
        self, request: prefill_pb2.RunRequest, context: Context
    ) -> prefill_pb2.RunResponse:
        problem = self._find_problem(request)
        if problem is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        if self._shutdown.is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        try:
            with self._thread.lock:
                scored = request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None
                run = self._table.start(request.request_id, list(request.prompt_ids), request.ticket.end, scored)
                watch = self._watches[run.id] = _Watch()
                self._thread.wake()
        except NoRoomError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), ((rpc.REFUSED_FOR, rpc.NO_ROOM),))
        except NeverFitsError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            return await self._hand_over(request, run, watch)
        except OfferFailedError as failure:
            await context.abort(failure.code, str(failure))
        except asyncio.CancelledError:
            self._metrics.cancelled.labels("prefill" if run.num_missing else "transfer").inc()
            log.info("prefill cancelled", request_id=request.request_id)
            raise
        finally:
            del self._watches[run.id]
            with self._thread.lock:
                self._table.end(run)

    def _find_problem(self, request: prefill_pb2.RunRequest) -> str | None:
        ticket = request.ticket
        if not 0 <= ticket.begin < ticket.end < len(request.prompt_ids) <= self._context_tokens:
            return (
                f"positions [{ticket.begin}, {ticket.end}) of a prompt of {len(request.prompt_ids)} tokens are wanted; "
                f"they must be part of it, and at most {self._context_tokens} tokens fit the context"
            )
        if ticket.begin % self._table.page_tokens:
            return f"begin {ticket.begin} is not on a page border ({self._table.page_tokens} tokens a page)"
        return find_too_many_logprobs("num_prompt_logprobs", request.num_prompt_logprobs) or find_foreign_token(
            request.prompt_ids, self._vocab_size
        )

    async def _hand_over(
        self, request: prefill_pb2.RunRequest, run: PrefillRun, watch: _Watch
    ) -> prefill_pb2.RunResponse:
        """Offer the run's pages as they are computed; returns after the last acknowledgement."""
        offered = request.ticket.begin
        result = prefill_pb2.RunResponse()
        while offered < run.end:
            if not await self._wait_for_step(watch):
                if self._thread.progress().step_age_s < self._stall_s:  # a stuck engine lets the session's lease end
                    await self._offers.renew(request.ticket)
                continue
            if watch.error is not None:
                raise OfferFailedError(grpc.StatusCode.INTERNAL, str(watch.error))
            positions = self._table.next_offer(run, offered)
            if positions is not None:
                pages = self._table.pages_of(run, positions)
                answer = await self._offers.send(request.ticket, request.request_id, positions, pages)
                result.transfer_seconds += answer.seconds
                result.transfer_bytes += answer.bytes
                offered = positions.stop
                if run.computed > offered or run.computed == run.end:
                    watch.has_news.set()  # more was computed while the offer was read
        result.prompt_logprobs.extend(
            decode_pb2.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)
            for one in run.prompt_logprobs
        )
        result.queue_seconds = watch.started - watch.created
        result.prefill_seconds = watch.ended - watch.started
        result.transport = self._offers.transports()[request.ticket.address]
        self._metrics.queue_seconds.observe(result.queue_seconds)
        self._metrics.prefill_seconds.observe(result.prefill_seconds)
        log.info("prefilled", request_id=run.request_id, tokens=run.end, bytes=result.transfer_bytes)
        return result

    async def _wait_for_step(self, watch: _Watch) -> bool:
        """True after a step with this run; False when none came within a heartbeat."""
        try:
            # not wait_for, which before Python 3.12 swallows a cancellation that comes with the news
            async with asyncio.timeout(self._heartbeat_s):
                await watch.has_news.wait()
        except TimeoutError:
            return False
        watch.has_news.clear()
        return True

    async def Drain(  # noqa: N802
        self, request: decode_pb2.DrainRequest, context: Context
    ) -> decode_pb2.DrainResponse:
        self._shutdown.begin(f"Drain from {context.peer()}")
        return decode_pb2.DrainResponse(num_left=self._shutdown.num_left, drain_s=self._shutdown.drain_s)

    async def Status(  # noqa: N802
        self, request: decode_pb2.StatusRequest, context: Context
    ) -> decode_pb2.WorkerStatus:
        progress = self._thread.progress()
        allocator = self._table.allocator
        return decode_pb2.WorkerStatus(
            peer=self._me,
            context_tokens=self._context_tokens,
            free_pages=allocator.num_free,
            used_pages=allocator.num_used,
            num_running=len(self._table),
            num_waiting=sum(run.computed == 0 for run in self._table),
            max_running=self._table.max_running,
            steps=progress.steps,
            step_age_s=progress.step_age_s,
            draining=self._shutdown.is_draining,
            transports=self._offers.transports(),
        )
