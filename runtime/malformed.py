"""Malformed protobuf messages are errors of their call, on both sides.

A request: INVALID_ARGUMENT; gRPC would log a traceback and answer UNKNOWN. An answer: BrokenAnswerError; gRPC would
return None. Also shortens errors that quote too much of a request, so that they fit a header; gRPC would fail with
INTERNAL or nothing.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from runtime.peer_input import shorten

Context = grpc.aio.ServicerContext[Any, Any]
Refuse = Callable[[Context], Awaitable[NoReturn]]  # ends a call
Admit = Callable[[str, bytes, Context], AbstractAsyncContextManager[None]]  # around parsing a message of a method

MALFORMED = "the request is no message of this method"
METHOD_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
ResponseT = TypeVar("ResponseT")


class BrokenAnswerError(grpc.aio.AioRpcError):
    """An answer is not a message of its method. Whether the server did what was asked is unknown: the call is lost."""

    def __init__(self, method: str) -> None:
        detail = f"what came is no answer of {method}"
        super().__init__(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), detail)


def check_answers(channel: grpc.aio.Channel) -> None:
    """From now on calls of this channel raise BrokenAnswerError. Before any stub is made of it."""
    for kind in METHOD_KINDS:
        setattr(channel, kind, _checked(getattr(channel, kind)))


def _checked(open_method: Callable[..., Any]) -> Callable[..., Any]:
    def open_checked(method: str, *args: Any, response_deserializer: Any = None, **more: Any) -> Any:
        if response_deserializer is None:
            return open_method(method, *args, **more)
        opened = open_method(method, *args, response_deserializer=_forgive(response_deserializer), **more)
        return lambda *args, **options: _CheckedCall(opened(*args, **options), method)

    return open_checked


class _CheckedCall:
    """A call whose answers are messages."""

    def __init__(self, call: Any, method: str) -> None:
        self._call = call
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        if (answer := (yield from self._call.__await__())) is None:
            raise BrokenAnswerError(self._method)
        return answer

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for answer in self._call:
                if answer is None:
                    raise BrokenAnswerError(self._method)
                yield answer
        finally:
            self._call.cancel()  # if it has not ended


async def ask_twice(call: Callable[[], Awaitable[ResponseT]]) -> ResponseT:
    """The answer to a call that may be made again if its first answer is broken."""
    try:
        return await call()
    except BrokenAnswerError:
        return await call()


async def refuse_plainly(context: Context) -> NoReturn:
    """INVALID_ARGUMENT, without details."""
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """Guards every method that takes one message; methods that take a stream stay unguarded.

    `refuse` ends a malformed call; `admit` may wait, or end the call.
    """

    def __init__(self, refuse: Refuse = refuse_plainly, admit: Admit = lambda *_: nullcontext()) -> None:
        self._refuse = refuse
        self._admit = admit

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        inner, build = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        if handler.response_streaming:
            inner, build = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        guard = _guard_generator if inspect.isasyncgenfunction(inner) else _guard
        parse = _forgive(handler.request_deserializer)

        async def read(data: bytes, context: Context) -> Any:
            async with self._admit(handler_call_details.method, data, context):
                if (request := parse(data)) is None:
                    await self._refuse(context)
                return request

        return build(guard(inner, read), None, handler.response_serializer)


class _Brief:
    """A call's context whose error details fit a header, even if they quote what a peer sent."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        await self._context.abort(code, shorten(details), trailing_metadata)


def _forgive(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """bytes |-> message, or None if malformed."""

    def parse_or_none(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return None

    return parse_or_none


Read = Callable[[bytes, Context], Awaitable[Any]]


def _guard(inner: Any, read: Read) -> Callable[[bytes, Context], Any]:
    async def answer(data: bytes, context: Context) -> Any:
        call = inner(await read(data, context), cast(Context, _Brief(context)))
        del data
        try:
            return await call
        except grpc.aio.AbortError as error:
            raise _without_frames(error)  # noqa: B904

    return answer


def _guard_generator(inner: Any, read: Read) -> Callable[[bytes, Context], Any]:
    async def answer(data: bytes, context: Context) -> AsyncIterator[Any]:
        call = inner(await read(data, context), cast(Context, _Brief(context)))
        del data
        try:
            async with aclosing(call) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError as error:
            raise _without_frames(error)  # noqa: B904

    return answer


def _without_frames(error: BaseException) -> BaseException:
    """A call's context keeps the error that ends it: with its frames, it would keep the request, of up to 500 MB."""
    error.__context__ = None
    return error.with_traceback(None)
