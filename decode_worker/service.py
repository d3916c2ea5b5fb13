"""The Decode service: maps messages to calls of the scheduler, the receiver and the streams, and back.

Runs on the asyncio thread; decides nothing.
"""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import structlog

from decode_worker.interfaces import Drafts, GrammarBrokenError, GrammarBusyError, GrammarRefusedError, GrammarSource
from decode_worker.kv_receiver import KVReceiver
from decode_worker.metrics import DecodeMetrics
from decode_worker.streams import GatewayStreams
from protos import decode_pb2, decode_pb2_grpc, kv_pb2, worker_pb2
from runtime import rpc
from runtime.peer_input import find_too_many_logprobs
from wire.messages import unpack_images, unpack_retention, unpack_sampling
from wire.page_keys import TOKEN_BYTES
from worker.features import Features
from worker.params import SequenceParams
from worker.peers.kv_peers import HandshakeRefusedError
from worker.plan import ChunkSizes
from worker.receiving import OfferRefusedError
from worker.role import Worker
from worker.sequences import Phase
from worker.service import Context, WorkerService, admits
from worker.thread import EngineThread

MOST_WAIT_S, MOST_WAIT_SHARE = 4.0, 0.8  # longest wait for a grammar or for saved KV, also as a share of the timeout
log = structlog.get_logger()


class DecodeService(WorkerService, decode_pb2_grpc.DecodeServicer):
    """Rpcs that change the scheduler hold the loop's lock for microseconds; Status reads without it."""

    def __init__(
        self, worker: Worker, thread: EngineThread, features: Features, receiver: KVReceiver, streams: GatewayStreams,
        metrics: DecodeMetrics, drafts: Drafts, grammars: GrammarSource, chunks: ChunkSizes,
    ) -> None:  # fmt: skip
        super().__init__(worker, thread, features, receiver.peers.transports, metrics)
        self._receiver = receiver
        self._streams = streams
        self._metrics = metrics
        self._drafts = drafts
        self._grammars = grammars
        self._chunks = chunks

    @admits
    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Context) -> decode_pb2.ReserveResponse:
        await self._check_open(request.gateway, context)
        problem = self._find_problem(request)
        if problem is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        grammar, began = None, time.monotonic()
        if request.HasField("grammar"):
            grammar = await self._find_grammar(request.grammar, context)
            await self._check_open(request.gateway, context)  # that may have taken seconds
        try:
            drafter = self._drafts.resolve(request.speculation.drafter, request.speculation.max_draft_tokens)
            params = build_params(request, *drafter, grammar, time.monotonic() - began if grammar else 0.0)
            self.check_images(params)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        keys = self._scheduler.kv.keys_of(params)
        source = request.source if request.HasField("source") else None
        is_scored, wait_s = params.num_prompt_logprobs is not None, find_wait(context)
        if not is_scored and not await self.tiers.restore(params, keys, wait_s, source):
            detail = "KV of the prompt is still being read"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, detail, ((rpc.REFUSED_FOR, rpc.RESTORING),))
        encoded = await self.encode_images(params, request.images, keys, find_wait(context), context)
        if encoded is None:
            detail = "images of the prompt are still being encoded"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, detail, ((rpc.REFUSED_FOR, rpc.RESTORING),))
        await self._check_open(request.gateway, context)  # the two may have taken seconds
        sequence = await self.admit(encoded, keys, context)
        log.info(
            "session reserved", request_id=params.request_id, session=sequence.id, attempt=params.attempt,
            cached=sequence.num_cached,
        )  # fmt: skip
        ticket = kv_pb2.Ticket(
            address=self._me.address, incarnation=self._me.incarnation, session=sequence.id,
            attempt=sequence.params.attempt, begin=sequence.num_cached, end=sequence.params.end,
            adapter=sequence.params.adapter,
        )  # fmt: skip
        return decode_pb2.ReserveResponse(ticket=ticket, needs_prefill=sequence.phase is Phase.RECEIVING)

    async def _check_open(self, gateway: str, context: Context) -> None:
        await self.check_draining(context)
        if not self._streams.is_open(gateway):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"gateway {gateway} has no Steps stream open here")

    async def _find_grammar(self, wanted: decode_pb2.Grammar, context: Context) -> object:
        """Responds in time even if the grammar is not ready."""
        try:
            return await self._grammars.get(wanted.kind, wanted.text, find_wait(context))
        except GrammarRefusedError as error:
            at_fault = ((rpc.FIELD_AT_FAULT, "grammar"), (rpc.PARAM_AT_FAULT, error.param))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error), at_fault)
        except GrammarBusyError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), ((rpc.REFUSED_FOR, rpc.GRAMMAR_BUSY),))
        except GrammarBrokenError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))

    def _find_problem(self, request: decode_pb2.ReserveRequest) -> str | None:
        total = len(request.prompt) // TOKEN_BYTES + request.max_tokens
        if not request.prompt or not request.max_tokens:
            return "prompt and max_tokens must not be empty"
        if total > self._context_tokens:
            return f"prompt and answer of {total} tokens exceed the context of {self._context_tokens}"
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if (problem := find_too_many_logprobs(name, getattr(request, name))) is not None:
                return problem
        biased = [bias.token_id for bias in request.sampling.logit_bias]
        for name, token_ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", biased)):
            if max(token_ids, default=0) >= self._vocab_size:
                return f"{name} names token {max(token_ids)}; the model has the tokens 0 to {self._vocab_size - 1}"
        return self.find_bad_prompt(request.prompt)

    async def Steps(self, request: decode_pb2.StepsRequest, context: Context) -> AsyncIterator[decode_pb2.StepEvents]:
        if self._streams.is_open(request.gateway):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"gateway {request.gateway} already has a Steps stream")
        try:
            async with aclosing(self._streams.stream(request.gateway)) as updates:
                async for events in updates:
                    yield events
        finally:
            with self._thread.lock:
                ended = self._scheduler.abort(request.gateway)
                self._thread.wake()
            log.info("gateway left", gateway=request.gateway, sessions_ended=len(ended))

    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:
        with self._thread.lock:
            phases = {sequence.id: sequence.phase.value for sequence in self._scheduler}
            ended = self._scheduler.abort(request.gateway, set(request.handles))
            self._thread.wake()
        for sequence in ended:
            self._metrics.cancelled.labels(phases[sequence.id]).inc()
            log.info("session cancelled", request_id=sequence.params.request_id, session=sequence.id)
        return decode_pb2.AbortResponse()

    async def Handshake(self, request: decode_pb2.HandshakeRequest, context: Context) -> decode_pb2.HandshakeResponse:
        try:
            known = await self._receiver.peers.shake_hands(request.peer)
        except HandshakeRefusedError as error:
            log.error("handshake refused", peer=request.peer.address, reason=str(error))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return decode_pb2.HandshakeResponse(
            peer=self._me, transport=known.transport, wants_checksums=self._receiver.peers.wants_checksums
        )  # fmt: skip

    async def Renew(self, request: decode_pb2.RenewRequest, context: Context) -> decode_pb2.RenewResponse:
        try:
            self._receiver.renew(request.ticket)
        except OfferRefusedError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, error.detail)
        return decode_pb2.RenewResponse()

    def add_to_status(self, status: worker_pb2.WorkerStatus) -> None:
        chunks, peers = self._chunks, self._receiver.peers
        status.goal_answers = chunks.most_answers(self._scheduler.max_running) if chunks.has_goal else 0
        status.chunk_costs.CopyFrom(
            worker_pb2.ChunkCosts(
                quiet_seconds=chunks.quiet_s, fixed_seconds=chunks.fixed_s, token_seconds=chunks.token_s,
                tokens=chunks.beside, read_token_seconds=peers.read_token_s,
            )
        )  # fmt: skip

    async def Offer(self, request: kv_pb2.OfferRequest, context: Context) -> kv_pb2.OfferResponse:
        return await self._receiver.take(request)


def find_wait(context: Context) -> float:
    """Seconds that a call may wait for what it needs: a worker that is silent for too long counts as dead."""
    left_s = context.time_remaining()
    return MOST_WAIT_S if left_s is None else min(MOST_WAIT_S, MOST_WAIT_SHARE * left_s)


def build_params(
    request: decode_pb2.ReserveRequest, drafter: str, max_draft_tokens: int, grammar: object | None = None,
    grammar_s: float = 0.0,
) -> SequenceParams:  # fmt: skip
    """ValueError if a parameter is out of range, or two contradict each other."""
    return SequenceParams(
        request_id=request.request_id,
        prompt=request.prompt,
        end=len(request.prompt) // TOKEN_BYTES - 1,
        max_tokens=request.max_tokens,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        num_prompt_logprobs=request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None,
        local_prefill_max_tokens=request.local_prefill_max_tokens,
        gateway=request.gateway,
        handle=request.handle,
        attempt=request.attempt,
        sampling=unpack_sampling(request.sampling),
        stop_token_ids=frozenset(request.stop_token_ids),
        min_tokens=request.min_tokens,
        num_emitted=request.num_emitted,
        num_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
        drafter=drafter,
        max_draft_tokens=max_draft_tokens,
        probes=request.speculation.drafter not in ("", "auto"),
        grammar=grammar,
        grammar_s=grammar_s,
        images=unpack_images(request.images),
        retention=unpack_retention(request.retention),
    )
