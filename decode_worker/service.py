"""The Decode service: turns messages into calls of the session table, the intake and the streams, and back.

Lives on the asyncio thread; decides nothing.
"""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import structlog

from decode_worker.grammar.errors import GrammarBrokenError, GrammarBusyError, GrammarRefusedError
from decode_worker.grammar.grammars import Grammars
from decode_worker.grammar.matcher import Grammar
from decode_worker.intake import HandshakeRefusedError, Intake
from decode_worker.metrics import DecodeMetrics
from decode_worker.session import NothingToShareError, OfferRefusedError, Phase, Reservation, Session
from decode_worker.session_table import SessionTable
from decode_worker.speculation.speculator import Speculator
from decode_worker.streams import GatewayStreams
from engine.kvcache.allocator import NeverFitsError, NoRoomError
from engine.sampling import SamplingParams
from engine.thread import EngineThread
from protos import decode_pb2, decode_pb2_grpc, kv_pb2
from runtime import rpc
from runtime.lifecycle import Shutdown
from runtime.peer_input import find_foreign_token, find_too_many_logprobs

Context = grpc.aio.ServicerContext[Any, Any]
GRAMMAR_WAIT_S, GRAMMAR_WAIT_SHARE = 4.0, 0.8  # a Reserve's longest wait for its grammar, and of what its caller waits
log = structlog.get_logger()


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Every rpc that changes the table holds the loop's lock, for microseconds; Status reads without it."""

    def __init__(
        self,
        me: kv_pb2.Peer,
        table: SessionTable,
        thread: EngineThread,
        intake: Intake,
        streams: GatewayStreams,
        metrics: DecodeMetrics,
        context_tokens: int,
        vocab_size: int,
        shutdown: Shutdown,
        speculator: Speculator,
        grammars: Grammars,
    ) -> None:
        self._me = me
        self._table = table
        self._thread = thread
        self._intake = intake
        self._streams = streams
        self._metrics = metrics
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._shutdown = shutdown
        self._speculator = speculator
        self._grammars = grammars

    async def Reserve(  # noqa: N802
        self,
        request: decode_pb2.ReserveRequest,
        context: Context,
    ) -> decode_pb2.ReserveResponse:
        await self._check_open(request.gateway, context)
        problem = self._find_problem(request)
        if problem is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        grammar = None
        if request.HasField("grammar"):
            grammar = await self._find_grammar(request.grammar, context)
            await self._check_open(request.gateway, context)  # that took a while
        try:
            drafter = self._speculator.resolve(request.speculation.drafter, request.speculation.max_draft_tokens)
            wanted = _reservation(request, *drafter, grammar)
            with self._thread.lock:
                session = self._table.reserve(wanted, time.monotonic())
                self._thread.wake()
        except NothingToShareError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except NoRoomError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), ((rpc.REFUSED_FOR, rpc.NO_ROOM),))
        except (NeverFitsError, ValueError) as error:  # ValueError: a parameter out of range, or two that do not agree
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        log.info("session reserved", request_id=request.request_id, session=session.id, attempt=session.attempt)
        return decode_pb2.ReserveResponse(ticket=self._ticket(session), needs_prefill=session.phase is Phase.RECEIVING)

    async def _check_open(self, gateway: str, context: Context) -> None:
        if self._shutdown.is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        if not self._streams.is_open(gateway):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"gateway {gateway} has no Steps stream open here")

    async def _find_grammar(self, wanted: decode_pb2.Grammar, context: Context) -> Grammar:
        """Answers in time even if the grammar is not there yet: who is silent for too long counts as dead."""
        left_s = context.time_remaining()
        wait_s = GRAMMAR_WAIT_S if left_s is None else min(GRAMMAR_WAIT_S, GRAMMAR_WAIT_SHARE * left_s)
        try:
            return await self._grammars.get(wanted.kind, wanted.text, wait_s)
        except GrammarRefusedError as error:
            problem = f"the answer's {wanted.kind} cannot be used: {error}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem, ((rpc.FIELD_AT_FAULT, "grammar"),))
        except GrammarBusyError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), ((rpc.REFUSED_FOR, rpc.GRAMMAR_BUSY),))
        except GrammarBrokenError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))

    def _find_problem(self, request: decode_pb2.ReserveRequest) -> str | None:
        total = len(request.prompt_ids) + request.max_tokens
        if not request.prompt_ids or not request.max_tokens:
            return "prompt_ids and max_tokens must not be empty"
        if total > self._context_tokens:
            return f"prompt and answer of {total} tokens exceed the context of {self._context_tokens}"
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if (problem := find_too_many_logprobs(name, getattr(request, name))) is not None:
                return problem
        biased = [bias.token_id for bias in request.sampling.logit_bias]
        for name, token_ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", biased)):
            if max(token_ids, default=0) >= self._vocab_size:
                return f"{name} names token {max(token_ids)}; the model has the tokens 0 to {self._vocab_size - 1}"
        return find_foreign_token(request.prompt_ids, self._vocab_size)

    def _ticket(self, session: Session) -> kv_pb2.Ticket:
        return kv_pb2.Ticket(
            address=self._me.address,
            incarnation=self._me.incarnation,
            session=session.id,
            attempt=session.attempt,
            begin=session.computed,
            end=session.num_prompt - 1,
        )

    async def Steps(  # noqa: N802
        self, request: decode_pb2.StepsRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StepEvents]:
        if self._streams.is_open(request.gateway):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"gateway {request.gateway} listens already")
        try:
            async with aclosing(self._streams.stream(request.gateway)) as news:
                async for events in news:
                    yield events
        finally:
            with self._thread.lock:
                ended = self._table.abort_gateway(request.gateway)
                self._thread.wake()
            log.info("gateway left", gateway=request.gateway, sessions_ended=len(ended))

    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: Context
    ) -> decode_pb2.AbortResponse:
        with self._thread.lock:
            phases = {session.id: session.phase.value for session in self._table}
            ended = self._table.abort(request.gateway, request.handles)
            self._thread.wake()
        for session in ended:
            self._metrics.cancelled.labels(phases[session.id]).inc()
            log.info("session cancelled", request_id=session.request_id, session=session.id)
        return decode_pb2.AbortResponse()

    async def Handshake(  # noqa: N802
        self,
        request: decode_pb2.HandshakeRequest,
        context: Context,
    ) -> decode_pb2.HandshakeResponse:
        try:
            transport = await self._intake.shake_hands(request.peer)
        except HandshakeRefusedError as error:
            log.error("handshake refused", peer=request.peer.address, reason=str(error))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return decode_pb2.HandshakeResponse(peer=self._me, transport=transport)

    async def Renew(  # noqa: N802
        self, request: decode_pb2.RenewRequest, context: Context
    ) -> decode_pb2.RenewResponse:
        try:
            self._intake.renew(request.ticket)
        except OfferRefusedError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, error.detail)
        return decode_pb2.RenewResponse()

    async def Offer(  # noqa: N802
        self, request: kv_pb2.OfferRequest, context: Context
    ) -> kv_pb2.OfferResponse:
        return await self._intake.take(request)

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
            num_running=sum(session.phase is not Phase.ENDED for session in self._table),
            num_waiting=len(self._table.in_phase(Phase.PREEMPTED, Phase.SHARING)),
            max_running=self._table.max_running,
            steps=progress.steps,
            step_age_s=progress.step_age_s,
            draining=self._shutdown.is_draining,
            transports=self._intake.transports(),
        )


def _reservation(
    request: decode_pb2.ReserveRequest, drafter: str, max_draft_tokens: int, grammar: Grammar | None
) -> Reservation:
    sampling = request.sampling
    return Reservation(
        request_id=request.request_id,
        attempt=request.attempt,
        gateway=request.gateway,
        handle=request.handle,
        prompt_ids=list(request.prompt_ids),
        max_tokens=request.max_tokens,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=tuple((bias.token_id, bias.bias) for bias in sampling.logit_bias),
        ),
        stop_token_ids=frozenset(request.stop_token_ids),
        local_prefill_max_tokens=request.local_prefill_max_tokens,
        num_emitted=request.num_emitted,
        min_tokens=request.min_tokens,
        num_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
        num_prompt_logprobs=request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None,
        share_with=request.share_with,
        drafter=drafter,
        max_draft_tokens=max_draft_tokens,
        grammar=grammar,
    )
