"""A server that garbles one answer or request of a method: what it sends or takes then is no protobuf message."""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

GARBAGE = b"\xff" * 9


class Garbler(grpc.aio.ServerInterceptor):
    """Garbles the next answer of the methods in `wanted`, a message of a stream among them, and requests likewise."""

    def __init__(self) -> None:
        self.wanted: Counter[str] = Counter()  # method |-> how many of its next answers
        self.wanted_requests: Counter[str] = Counter()
        self.garbled: list[str] = []

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None:
            return None
        serialize = handler.response_serializer or bytes
        inner: Any = handler

        def garble(answer: Any) -> bytes:
            if not self.wanted[method]:
                return serialize(answer)
            self.wanted[method] -= 1
            self.garbled.append(method)
            return GARBAGE

        def garble_request(data: bytes) -> bytes:
            """As it is: it is parsed behind this interceptor."""
            if not self.wanted_requests[method]:
                return data
            self.wanted_requests[method] -= 1
            self.garbled.append(method)
            return GARBAGE

        assert handler.request_deserializer is None
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(inner.unary_stream, garble_request, garble)
        return grpc.unary_unary_rpc_method_handler(inner.unary_unary, garble_request, garble)
