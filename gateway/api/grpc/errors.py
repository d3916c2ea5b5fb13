"""Errors (a status with machine-readable details), API keys and request ids on gRPC. Must not know requests."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gateway.api.access import REQUEST_ID_HEADER, check_key, pick_request_id
from gateway.errors import ApiError, bad_request
from runtime.malformed import MALFORMED
from runtime.peer_input import shorten

_OPEN_METHOD = "/grpc.health.v1.Health/Check"  # liveness probes have no key

_CODES = {  # HTTP status |-> gRPC code
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]] | None


def pick_call_id(context: Context) -> str:
    """The client's id for this call, or a new one."""
    given = _find(context.invocation_metadata(), REQUEST_ID_HEADER)
    return pick_request_id(given if isinstance(given, str) else None)


async def send_call_id(context: Context, request_id: str) -> None:
    """Sends the id to the client as initial metadata."""
    await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))


async def refuse_malformed(context: Context) -> NoReturn:
    """Ends a call whose request is not a valid message."""
    await _refuse(context, bad_request(MALFORMED, None, "invalid_message"))


async def abort_with(context: Context, error: ApiError) -> NoReturn:
    """Ends the call with the error's message, code, field and retry delay."""
    code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
    message = shorten(error.message)
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, message):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    trailer = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, message, trailer)


def _details(error: ApiError, message: str) -> list[Message]:
    details: list[Message] = []
    if error.code is not None:
        details.append(error_details_pb2.ErrorInfo(reason=error.code.upper(), domain="baton"))
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds = error.retry_after_s
        details.append(retry)
    return details


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid API key, except the health check."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._api_keys = tuple(api_keys)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if handler_call_details.method != _OPEN_METHOD:
            try:
                check_key(_authorization(handler_call_details), self._api_keys)
            except ApiError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _authorization(details: grpc.HandlerCallDetails) -> bytes:
    value = _find(details.invocation_metadata, "authorization") or b""
    return value if isinstance(value, bytes) else value.encode()


def _find(metadata: Metadata, name: str) -> str | bytes | None:
    return next((value for key, value in metadata or () if key == name), None)


def _refusal(error: ApiError) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler that refuses before it reads. It streams in both directions, so it can replace any kind of method."""

    async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
        await _refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


async def _refuse(context: Context, error: ApiError) -> NoReturn:
    """Ends a call that has no request id yet."""
    await send_call_id(context, pick_call_id(context))
    await abort_with(context, error)
