"""The public gRPC service: the same requests, rules and errors as REST."""

# ruff: noqa: N802 (rpcs have the names of their proto)

import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.access.keys import Key, Keys
from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals, begin, stream_choices, timing_fields
from gateway.api.access import REQUEST_ID_HEADER, log_key, pick_request_id, unique_id, waking_timeout, warning_headers
from gateway.api.grpc.message_parts import check_parts
from gateway.api.grpc.requests import chat_request, check_known, embed_request, generate_request, tokenize_request
from gateway.api.http.connection import KEEP_ALIVE_S, MAX_CONNECTIONS
from gateway.embeddings.embed import embed
from gateway.errors import ApiError, bad_request
from gateway.fair_turns import SHORT_BYTES, LoopTurn
from gateway.request.prepare import ServedModels, detokenize, tokenize
from gateway.request.types import GenerateRequest
from gateway.tools.parse import CallEnd
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from runtime.malformed import MALFORMED, MalformedInterceptor
from runtime.peer_input import shorten

_log = structlog.get_logger()

_OPEN_METHOD = "/grpc.health.v1.Health/Check"  # liveness probes have no key
_CODES = {  # HTTP status |-> gRPC code
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
_NO_TURN = LoopTurn()
_INPUTS = {f"/{one.containing_service.full_name}/{one.name}": one.input_type for one in _SERVICE.methods}
_turn = ContextVar("turn", default=_NO_TURN)  # of the call


class _StalledClientError(Exception):
    """A client did not read a message in time."""


def build_interceptors(served: ServedModels) -> Sequence[grpc.aio.ServerInterceptor]:
    """Returns the interceptors, which the gRPC server takes at construction."""

    @asynccontextmanager
    async def admit(method: str, data: bytes, context: Context) -> AsyncIterator[None]:
        """Counts and checks a message, in turns, before it is parsed. gRPC has already read it."""
        kind = _INPUTS.get(method)
        if kind is None or len(data) <= SHORT_BYTES:
            yield
            return
        try:
            owner = served.keys.check(context.invocation_metadata() or ()).name
            async with served.held.body(owner) as hold:
                hold(len(data))
                _turn.set(turn := served.new_turn(owner, len(data)))
                await turn.step()
                check_parts(kind, data, served.context_tokens)
                await turn.step()
                yield
        except ApiError as error:
            await _refuse(context, error)

    malformed = partial(bad_request, MALFORMED, None, "invalid_message")
    return [_KeyInterceptor(served.keys), MalformedInterceptor(lambda context: _refuse(context, malformed()), admit)]


def bound_connections(client_timeout_s: float) -> Sequence[tuple[str, int]]:
    """Options of the gRPC server: beyond MAX_CONNECTIONS new ones are refused, as gRPC cannot choose an idle one."""
    most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)  # REST has three quarters
    return (
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.max_connection_idle_ms", int(1000 * KEEP_ALIVE_S)),
        ("grpc.server_handshake_timeout_ms", int(1000 * client_timeout_s)),
    )


def add_inference_services(server: grpc.aio.Server, served: ServedModels) -> None:
    """Adds Inference, health and reflection."""
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(served), server)
    health_pb2_grpc.add_HealthServicer_to_server(ReadinessService(served), server)
    names = [
        _SERVICE.full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    ]
    reflection.enable_server_reflection(names, server)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference."""

    def __init__(self, served: ServedModels) -> None:
        self._served = served

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Streams continuations of one prompt."""
        await self._stream(context, partial(generate_request, request), _generate_message)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        """Streams answers to one conversation."""
        await self._stream(context, partial(chat_request, request), _chat_message)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turns text or a conversation into token ids."""
        async with _serving(context):
            await _turn.get().last_step()
            raw, key = tokenize_request(request), self._key(context)
            served = self._served.find(raw.model, key)
            token_ids = await tokenize(served, raw, key)
        return pb.TokenizeResponse(token_ids=token_ids, context_tokens=served.tokenizer.context_tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turns token ids into text."""
        async with _serving(context):
            await _turn.get().last_step()
            check_known(request)
            model, token_ids = request.model or None, tuple(request.token_ids)
            key = self._key(context)
            served = self._served.find(model, key)
            text = await detokenize(served, model, token_ids, "token_ids", key, with_control_tokens=False)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The models served."""
        async with _serving(context):
            check_known(request)
            names = self._served.names(self._key(context))
            models = [pb.Model(id=name, context_tokens=one.tokenizer.context_tokens) for name, one in names]
        return pb.ListModelsResponse(models=models)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Turns texts into vectors."""
        async with _serving(context) as request_id:
            arrived_s = time.perf_counter()
            await _turn.get().last_step()
            raw, key = embed_request(request), self._key(context)
            served = self._served.find(raw.model, key)
            found = await embed(served, raw, unique_id(request_id), arrived_s, key)
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=row) for row in found.rows], usage=pb.Usage(prompt_tokens=found.num_tokens)
        )

    def _key(self, context: Context) -> Key:
        """The key of the call. Raises ApiError if it is not accepted any more."""
        key = self._served.keys.check(context.invocation_metadata() or ())
        log_key(key)
        return key

    async def _stream(
        self,
        context: Context,
        read: Callable[[], GenerateRequest],
        write: Callable[[OutputDelta, Mapping[str, Any]], Message],
    ) -> None:
        """Serves a streamed call. Closes the ring's iterators if it is cancelled or its client stops reading.

        Writes instead of yielding: a cancelled write is then raised here, where the iterator is closed.
        """
        async with _serving(context) as request_id:
            arrived_s = time.perf_counter()
            await _turn.get().step()
            raw = read()
            await _turn.get().last_step()
            key = self._key(context)
            served = self._served.find(raw.model, key)
            totals = await begin(served, raw, unique_id(request_id), arrived_s, key, context.invocation_metadata)
            context.set_trailing_metadata(_trailing_metadata(totals.job.warnings, key))
            async with aclosing(stream_choices(served, totals)) as pieces:
                async for index, piece in pieces:
                    message = write(piece, _shared_fields(index, piece, totals, raw.with_timing))
                    try:
                        async with waking_timeout(self._served.options.stalled_client_s):
                            await context.write(message)
                    except TimeoutError as error:
                        raise _StalledClientError from error
            context.set_trailing_metadata(_trailing_metadata(totals.warnings(), key))


def _trailing_metadata(warnings: Sequence[str], key: Key) -> tuple[tuple[str, str], ...]:
    """Trailing metadata with what REST says in headers: warnings, and what is left of the key's limits."""
    return *warning_headers(warnings).items(), *key.allowance.headers(time.perf_counter()).items()


def _generate_message(piece: OutputDelta, shared: Mapping[str, Any]) -> pb.GenerateResponse:
    return pb.GenerateResponse(finish_reason=piece.finish_reason or "", **shared)


def _chat_message(piece: OutputDelta, shared: Mapping[str, Any]) -> pb.ChatResponse:
    """The message for a piece, with the tool calls that the piece completes."""
    calls = [event for event in piece.calls if isinstance(event, CallEnd)]
    return pb.ChatResponse(
        finish_reason=piece.ending or "",
        tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls],
        reasoning=piece.reasoning,
        **shared,
    )


def _shared_fields(index: int, piece: OutputDelta, totals: Totals, with_timing: bool) -> dict[str, Any]:
    """Fields of both kinds of messages. The request's last message has the token counts."""
    fields: dict[str, Any] = {"text": piece.text, "token_ids": piece.token_ids, "index": index}
    if piece.logprobs:
        fields["logprobs"] = [
            pb.TokenLogprob(
                token_id=token_id,
                logprob=given.logprob,
                top=[
                    pb.TokenLogprob(token_id=other, logprob=logprob)
                    for other, logprob in zip(given.top_ids, given.top_logprobs, strict=True)
                ],
            )
            for token_id, given in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
    if not totals.num_open:
        fields["usage"] = pb.Usage(
            prompt_tokens=totals.num_prompt,
            completion_tokens=totals.num_completion,
            cached_tokens=totals.num_cached,
            reasoning_tokens=totals.num_reasoning,
        )
    if with_timing and piece.timing:
        fields["timing"] = pb.Timing(**timing_fields(piece.timing, pb.Timing.DESCRIPTOR.fields_by_name))
    if piece.stop is not None:
        fields["stop_string" if isinstance(piece.stop, str) else "stop_token_id"] = piece.stop
    return fields


class ReadinessService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1.Health: serving while the ring is ready. `Watch` is not implemented, as the protocol allows."""

    def __init__(self, served: ServedModels) -> None:
        self._served = served

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The state of the server ("") or of Inference."""
        async with _serving(context):
            if request.service not in ("", "baton.v1.Inference"):
                raise ApiError(404, f"no service {request.service[:100]!r} here", "service")
        is_ready = self._served.readiness() is None
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)


@asynccontextmanager
async def _serving(context: Context) -> AsyncIterator[str]:
    """Yields the call's request id, which logs and answer have. An ApiError becomes a gRPC status, a bug INTERNAL."""
    given = _find(context.invocation_metadata(), REQUEST_ID_HEADER)
    request_id = pick_request_id(given if isinstance(given, str) else None)
    with structlog.contextvars.bound_contextvars(request_id=request_id):
        try:
            await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))
            yield request_id
        except ApiError as error:
            await _abort_with(context, error)
        except grpc.aio.BaseError:  # the call is over
            raise
        except _StalledClientError:
            _log.warning("client stopped reading; request cancelled")
            await context.abort(grpc.StatusCode.CANCELLED, "the client stopped reading")
        except Exception:
            _log.exception("call failed")
            message = f"call {request_id} failed inside the service; its log says why"
            await _abort_with(context, ApiError(500, message, None, "bug"))
        finally:
            _turn.get().end()


async def _abort_with(context: Context, error: ApiError) -> NoReturn:
    """Ends the call with the error's message, code, field and retry delay."""
    code, message = _CODES.get(error.status, grpc.StatusCode.INTERNAL), shorten(error.message)
    status = status_pb2.Status(code=code.value[0], message=message)
    if error.code is not None:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.code.upper(), domain="baton"))
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration(seconds=error.retry_after_s)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    await context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))


async def _refuse(context: Context, error: ApiError) -> NoReturn:
    """Ends a call that has no request id yet."""
    async with _serving(context):
        raise error
    raise AssertionError("the error has ended the call")


class _KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid API key, except the health check."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        if handler_call_details.method != _OPEN_METHOD:
            try:
                self._keys.check(handler_call_details.invocation_metadata or ())
            except ApiError as error:
                refusal = error

                async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
                    await _refuse(context, refusal)

                # refuses before it reads; streams in both directions, so that it can replace any kind of method
                return grpc.stream_stream_rpc_method_handler(handle)
        return await continuation(handler_call_details)


def _find(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> str | bytes | None:
    return next((value for key, value in metadata or () if key == name), None)
