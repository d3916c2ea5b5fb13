"""The Prefill service: one Run call is one prompt, from admission to the last acknowledged offer.

Runs on the asyncio thread; decides nothing.
"""

import asyncio

import grpc
import structlog

from prefill_worker.embedded import EmbeddedTexts, read_result
from prefill_worker.hand_overs import HandOvers
from prefill_worker.kv_sender import KVSender, OfferFailedError
from prefill_worker.metrics import PrefillMetrics
from protos import prefill_pb2, prefill_pb2_grpc, worker_pb2
from runtime.config_parts import HeartbeatConfig
from runtime.peer_input import find_too_many_logprobs
from wire.messages import unpack_images, unpack_retention
from wire.page_keys import TOKEN_BYTES
from worker.features import Features
from worker.params import SequenceParams
from worker.peers.kv_peers import KVPeers
from worker.role import Worker
from worker.service import Context, WorkerService, admits
from worker.thread import EngineThread

log = structlog.get_logger()


class PrefillService(WorkerService, prefill_pb2_grpc.PrefillServicer):
    """Calls that change the scheduler hold the engine thread's lock for microseconds; others read without it."""

    def __init__(
        self, worker: Worker, config: HeartbeatConfig, thread: EngineThread, features: Features, sender: KVSender,
        peers: KVPeers, metrics: PrefillMetrics, texts: EmbeddedTexts,
    ) -> None:  # fmt: skip
        def transports() -> dict[str, str]:
            return {**peers.transports(), **sender.transports()}

        super().__init__(worker, thread, features, transports, metrics)
        self._metrics = metrics
        self._sender = sender
        self._heartbeat_s = config.heartbeat_s
        self._texts = texts
        self.hand_overs = HandOvers(config, worker.scheduler.kv, thread, sender, metrics)

    @admits
    async def Run(self, request: prefill_pb2.RunRequest, context: Context) -> prefill_pb2.RunResponse:
        problem = self._find_problem(request)
        if problem is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        await self.check_draining(context)
        num_logprobs = request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None
        try:
            params = SequenceParams(
                request.request_id, request.prompt, request.ticket.end, 0, request.cache_salt, request.ticket.adapter,
                num_logprobs, images=unpack_images(request.images), retention=unpack_retention(request.retention),
            )  # fmt: skip
            self.check_images(params)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        keys = self._scheduler.kv.keys_of(params)
        source = request.source if request.HasField("source") else None
        try:
            wait, wait_s, ticket = self.hand_overs.wait, self._heartbeat_s, request.ticket
            if num_logprobs is None:
                await wait(ticket, lambda: self.tiers.restore(params, keys, wait_s, source))
            encoded = await wait(ticket, lambda: self.encode_images(params, request.images, keys, wait_s, context))
        except OfferFailedError as failure:
            await context.abort(failure.code, str(failure))
        sequence = await self.admit(encoded, keys, context, is_kept=True)
        try:
            result = await self.hand_overs.run(request, sequence)
        except OfferFailedError as failure:
            await context.abort(failure.code, str(failure))
        except asyncio.CancelledError:
            self._metrics.cancelled.labels("prefill" if sequence.computed < params.end else "transfer").inc()
            log.info("prefill cancelled", request_id=request.request_id)
            raise
        finally:
            with self._thread.lock:
                self._scheduler.end(sequence)
                self._thread.wake()
        return result

    @admits
    async def EmbedPrompt(
        self, request: prefill_pb2.EmbedPromptRequest, context: Context
    ) -> prefill_pb2.EmbedPromptResponse:
        problem, num_prompt = self.find_bad_prompt(request.prompt), len(request.prompt) // TOKEN_BYTES
        if problem is None and num_prompt >= self._context_tokens:
            problem = f"a text of {num_prompt} tokens is wanted; at most {self._context_tokens - 1} are computed"
        if problem is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        await self.check_draining(context)
        try:
            params, embedding = self._texts.begin(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            keys = [] if self._texts.is_whole else self._scheduler.kv.keys_of(params)
            sequence = await self.admit(params, keys, context)
            try:
                result = read_result(await embedding.ended, embedding)
            finally:
                with self._thread.lock:
                    self._scheduler.end(sequence)
                    self._thread.wake()
        finally:
            self._texts.end(params)
        if isinstance(result, tuple):
            await context.abort(*result)
        return result

    def add_to_status(self, status: worker_pb2.WorkerStatus) -> None:
        status.embeds = self._texts.embeds
        status.weaknesses.update(self._sender.find_weaknesses())

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
