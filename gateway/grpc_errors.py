"""Errors and API keys on gRPC: a status with machine-readable details.

Must not know what was asked.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from gateway.access import check_key
from gateway.errors import ApiError
from runtime.peer_input import shorten

_OPEN_METHOD = "/grpc.health.v1.Health/Check"  # liveness probes carry no key

_CODES = {  # HTTP status |-> gRPC code
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: ApiError) -> NoReturn:
    """Ends the call with the error, its field, its reason and when to try again."""
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
    """Lets calls with an API key pass; without one, only the health check."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._api_keys = tuple(api_keys)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Serves or refuses one call."""
        if handler_call_details.method != _OPEN_METHOD:
            try:
                check_key(_authorization(handler_call_details), self._api_keys)
            except ApiError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _authorization(details: grpc.HandlerCallDetails) -> bytes:
    value = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
    return value if isinstance(value, bytes) else value.encode()


def _refusal(error: ApiError) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler that refuses before it reads; streaming both ways it stands in for any kind of method."""

    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
