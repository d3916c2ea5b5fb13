"""The public gRPC service: the same requests, rules and errors as REST. Must not know where text comes from."""

# ruff: noqa: N802 (rpcs have the names of their proto)

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import grpc
import structlog
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import begin, stream_choices
from gateway.api.access import unique_id, warning_headers
from gateway.api.grpc.answers import AnswerMessages
from gateway.api.grpc.errors import Context, KeyInterceptor, abort_with, pick_call_id, refuse_malformed, send_call_id
from gateway.api.grpc.requests import chat_request, check_known, generate_request, tokenize_request
from gateway.api.waking_timeout import waking_timeout
from gateway.errors import ApiError
from gateway.request.prepare import ServedModel, detokenize, tokenize
from gateway.request.types import GenerateRequest
from protos import inference_pb2, inference_pb2_grpc
from runtime.malformed import MalformedInterceptor

_log = structlog.get_logger()


class _StalledClientError(Exception):
    """A client did not read a message in time."""


def build_interceptors(served: ServedModel) -> Sequence[grpc.aio.ServerInterceptor]:
    """Returns the interceptors, which the gRPC server takes at construction."""
    return [KeyInterceptor(served.options.api_keys), MalformedInterceptor(refuse_malformed)]


def add_inference_services(server: grpc.aio.Server, served: ServedModel) -> None:
    """Adds Inference, health and reflection."""
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(served), server)
    health_pb2_grpc.add_HealthServicer_to_server(ReadinessService(served), server)
    names = [
        inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    ]
    reflection.enable_server_reflection(names, server)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Streams continuations of one prompt."""
        await self._stream(context, lambda: generate_request(request), AnswerMessages.generate)

    async def Chat(self, request: inference_pb2.ChatRequest, context: Context) -> None:
        """Streams answers to one conversation."""
        await self._stream(context, lambda: chat_request(request), AnswerMessages.chat)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Turns text or a conversation into token ids."""
        async with _serving(context):
            token_ids = await tokenize(self._served, tokenize_request(request))
        return inference_pb2.TokenizeResponse(token_ids=token_ids, context_tokens=self._served.tokenizer.context_tokens)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        async with _serving(context):
            check_known(request)
            model, token_ids = request.model or None, tuple(request.token_ids)
            text = await detokenize(self._served, model, token_ids, "token_ids", with_control_tokens=False)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The models served."""
        async with _serving(context):
            check_known(request)
        context_tokens = self._served.tokenizer.context_tokens
        models = [inference_pb2.Model(id=name, context_tokens=context_tokens) for name in self._served.names.listed]
        return inference_pb2.ListModelsResponse(models=models)

    async def _stream(
        self,
        context: Context,
        read: Callable[[], GenerateRequest],
        write: Callable[[AnswerMessages, int, OutputDelta], Message],
    ) -> None:
        """Serves a streamed call. Closes the ring's iterators if it is cancelled or its client stops reading.

        Writes instead of yielding: a cancelled write is then raised here, where the iterator is closed.
        """
        try:
            async with (
                _serving(context) as request_id,
                aclosing(self._responses(context, request_id, read, write)) as responses,
            ):
                async for response in responses:
                    try:
                        async with waking_timeout(self._served.options.stalled_client_s):
                            await context.write(response)
                    except TimeoutError as error:
                        raise _StalledClientError from error
        except _StalledClientError:
            _log.warning("client stopped reading; request cancelled")
            await context.abort(grpc.StatusCode.CANCELLED, "the client stopped reading")

    async def _responses(
        self,
        context: Context,
        request_id: str,
        read: Callable[[], GenerateRequest],
        write: Callable[[AnswerMessages, int, OutputDelta], Message],
    ) -> AsyncGenerator[Message, None]:
        arrived_s = time.perf_counter()
        raw = read()
        totals = await begin(self._served, raw, unique_id(request_id), arrived_s, context.invocation_metadata)
        context.set_trailing_metadata(tuple(warning_headers(totals.job.warnings).items()))
        messages = AnswerMessages(totals, with_timing=raw.with_timing)
        async with aclosing(stream_choices(self._served, totals)) as pieces:
            async for index, piece in pieces:
                yield write(messages, index, piece)


class ReadinessService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1.Health: serving while the ring is ready. `Watch` is not implemented, as the protocol allows."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The state of the server ("") or of Inference."""
        async with _serving(context):
            if request.service not in ("", "baton.v1.Inference"):
                raise ApiError(404, f"no service {request.service[:100]!r} here", "service")
        is_ready = self._served.ring.check_ready() is None
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)


@asynccontextmanager
async def _serving(context: Context) -> AsyncIterator[str]:
    """Yields the call's request id, which logs and answer have. An ApiError becomes a gRPC status, a bug INTERNAL."""
    request_id = pick_call_id(context)
    with structlog.contextvars.bound_contextvars(request_id=request_id):
        try:
            await send_call_id(context, request_id)
            yield request_id
        except ApiError as error:
            await abort_with(context, error)
        except (grpc.aio.BaseError, _StalledClientError):  # the call is over, or the caller ends it
            raise
        except Exception:
            _log.exception("call failed")
            message = f"call {request_id} failed inside the service; its log says why"
            await abort_with(context, ApiError(500, message, None, "bug"))
