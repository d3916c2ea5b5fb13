"""A server that garbles one answer of a method: what it sends then is no protobuf message."""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

GARBAGE = b"\xff" * 9


class Garbler(grpc.aio.ServerInterceptor):
    """Garbles the next answer of the methods in `wanted`, a message of a stream among them."""

    def __init__(self) -> None:
        self.wanted: Counter[str] = Counter()  # method |-> how many of its next answers
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

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(inner.unary_stream, handler.request_deserializer, garble)
        return grpc.unary_unary_rpc_method_handler(inner.unary_unary, handler.request_deserializer, garble)
