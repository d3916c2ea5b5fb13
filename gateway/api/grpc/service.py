"""The public gRPC service: the same requests, rules and errors as REST."""

# ruff: noqa: N802 (rpcs have the names of their proto)

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import structlog
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals, begin, stream_choices, timing_fields
from gateway.api.access import unique_id, waking_timeout, warning_headers
from gateway.api.grpc.errors import Context, KeyInterceptor, abort_with, pick_call_id, refuse_malformed, send_call_id
from gateway.api.grpc.requests import chat_request, check_known, generate_request, tokenize_request
from gateway.errors import ApiError
from gateway.request.prepare import ServedModel, detokenize, tokenize
from gateway.request.types import GenerateRequest
from gateway.tools.parse import CallEnd
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from runtime.malformed import MalformedInterceptor
from wire.logprobs import TokenLogprobs

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
        pb.DESCRIPTOR.services_by_name["Inference"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    ]
    reflection.enable_server_reflection(names, server)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Streams continuations of one prompt."""
        await self._stream(context, lambda: generate_request(request), _AnswerMessages.generate)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        """Streams answers to one conversation."""
        await self._stream(context, lambda: chat_request(request), _AnswerMessages.chat)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turns text or a conversation into token ids."""
        async with _serving(context):
            token_ids = await tokenize(self._served, tokenize_request(request))
        return pb.TokenizeResponse(token_ids=token_ids, context_tokens=self._served.tokenizer.context_tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turns token ids into text."""
        async with _serving(context):
            check_known(request)
            model, token_ids = request.model or None, tuple(request.token_ids)
            text = await detokenize(self._served, model, token_ids, "token_ids", with_control_tokens=False)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The models served."""
        async with _serving(context):
            check_known(request)
        context_tokens = self._served.tokenizer.context_tokens
        names = self._served.names
        models = [pb.Model(id=name, context_tokens=context_tokens) for name in (*names.listed, *names.adapters)]
        return pb.ListModelsResponse(models=models)

    async def _stream(
        self,
        context: Context,
        read: Callable[[], GenerateRequest],
        write: "Callable[[_AnswerMessages, int, OutputDelta], Message]",
    ) -> None:
        """Serves a streamed call. Closes the ring's iterators if it is cancelled or its client stops reading.

        Writes instead of yielding: a cancelled write is then raised here, where the iterator is closed.
        """
        async with _serving(context) as request_id:
            arrived_s = time.perf_counter()
            raw = read()
            totals = await begin(self._served, raw, unique_id(request_id), arrived_s, context.invocation_metadata)
            context.set_trailing_metadata(tuple(warning_headers(totals.job.warnings).items()))
            messages = _AnswerMessages(totals, with_timing=raw.with_timing)
            async with aclosing(stream_choices(self._served, totals)) as pieces:
                async for index, piece in pieces:
                    message = write(messages, index, piece)
                    try:
                        async with waking_timeout(self._served.options.stalled_client_s):
                            await context.write(message)
                    except TimeoutError as error:
                        raise _StalledClientError from error


class _AnswerMessages:
    """Writes the choices of one request."""

    def __init__(self, totals: Totals, *, with_timing: bool) -> None:
        """`totals` must count a piece before it is written here."""
        self._totals = totals
        self._with_timing = with_timing

    def generate(self, index: int, piece: OutputDelta) -> pb.GenerateResponse:
        """A piece of a choice."""
        return pb.GenerateResponse(finish_reason=piece.finish_reason or "", **self._shared(index, piece))

    def chat(self, index: int, piece: OutputDelta) -> pb.ChatResponse:
        """A piece of a choice, with the tool calls that it completes."""
        calls = [event for event in piece.calls if isinstance(event, CallEnd)]
        return pb.ChatResponse(
            finish_reason=piece.ending or "",
            tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls],
            reasoning=piece.reasoning,
            **self._shared(index, piece),
        )

    def _shared(self, index: int, piece: OutputDelta) -> dict[str, Any]:
        """Fields of both messages. The request's last one has the token counts."""
        fields: dict[str, Any] = {"text": piece.text, "token_ids": piece.token_ids, "index": index}
        if piece.logprobs:
            pairs = zip(piece.token_ids, piece.logprobs, strict=True)
            fields["logprobs"] = [_logprob(token_id, given) for token_id, given in pairs]
        if not self._totals.num_open:
            fields["usage"] = pb.Usage(
                prompt_tokens=self._totals.num_prompt,
                completion_tokens=self._totals.num_completion,
                cached_tokens=self._totals.num_cached,
                reasoning_tokens=self._totals.num_reasoning,
            )
        if self._with_timing and piece.timing:
            names = pb.Timing.DESCRIPTOR.fields_by_name
            fields["timing"] = pb.Timing(**timing_fields(piece.timing, names))
        if piece.stop is not None:
            fields["stop_string" if isinstance(piece.stop, str) else "stop_token_id"] = piece.stop
        return fields


def _logprob(token_id: int, given: TokenLogprobs) -> pb.TokenLogprob:
    pairs = zip(given.top_ids, given.top_logprobs, strict=True)
    top = [pb.TokenLogprob(token_id=other, logprob=logprob) for other, logprob in pairs]
    return pb.TokenLogprob(token_id=token_id, logprob=given.logprob, top=top)


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
        except grpc.aio.BaseError:  # the call is over
            raise
        except _StalledClientError:
            _log.warning("client stopped reading; request cancelled")
            await context.abort(grpc.StatusCode.CANCELLED, "the client stopped reading")
        except Exception:
            _log.exception("call failed")
            message = f"call {request_id} failed inside the service; its log says why"
            await abort_with(context, ApiError(500, message, None, "bug"))
