"""Errors (a status with machine-readable details), API keys and request ids on gRPC."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration
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
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def pick_call_id(context: Context) -> str:
    """The client's id for this call, or a new one."""
    given = _find(context.invocation_metadata(), REQUEST_ID_HEADER)
    return pick_request_id(given if isinstance(given, str) else None)


async def send_call_id(context: Context, request_id: str) -> None:
    """Sends the id to the client as initial metadata."""
    await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))


async def abort_with(context: Context, error: ApiError) -> NoReturn:
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


async def refuse(context: Context, error: ApiError) -> NoReturn:
    """Ends a call that has no request id yet."""
    await send_call_id(context, pick_call_id(context))
    await abort_with(context, error)


async def refuse_malformed(context: Context) -> NoReturn:
    """Ends a call whose request is not a valid message."""
    await refuse(context, bad_request(MALFORMED, None, "invalid_message"))


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid API key, except the health check."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._api_keys = tuple(api_keys)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        if handler_call_details.method != _OPEN_METHOD:
            given = _find(handler_call_details.invocation_metadata, "authorization") or b""
            try:
                check_key(given if isinstance(given, bytes) else given.encode(), self._api_keys)
            except ApiError as error:
                refusal = error

                async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
                    await refuse(context, refusal)

                # refuses before it reads; streams in both directions, so that it can replace any kind of method
                return grpc.stream_stream_rpc_method_handler(handle)
        return await continuation(handler_call_details)


def _find(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> str | bytes | None:
    return next((value for key, value in metadata or () if key == name), None)
