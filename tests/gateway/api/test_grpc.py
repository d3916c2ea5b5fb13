"""gRPC only: reflection, health, request ids, details of all refusals, fields of newer clients."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from gateway.api.grpc import service
from runtime import rpc
from runtime.malformed import _guard, _guard_generator
from tests.support.api_server import ANSWER, KEYS, SERVED, WAIT_S, Served
from tests.support.grpc_adapters import read_status
from tests.support.tiny_tokenizer import CONTEXT
from tests.support.words import Outcome

KEY = ("authorization", f"Bearer {KEYS[0]}")
ID = "x-request-id"
INFERENCE = "baton.v1.Inference"
METHODS = [f"{INFERENCE}/{name}" for name in ("Generate", "Chat", "Tokenize", "Detokenize", "ListModels")]
CHECK = "grpc.health.v1.Health/Check"
UNKNOWN = b"\xfa\x06\x01x"  # field 111, a string


def ask(served: Served, method: str, request: bytes, *metadata: tuple[str, str | bytes]) -> Any:
    """Call to the end. A unary answer counts as a stream of one."""
    kind: grpc.UnaryStreamMultiCallable[bytes, bytes] = served.channel.unary_stream(f"/{method}")
    call: Any = kind(request, metadata=metadata, timeout=WAIT_S)
    with suppress(grpc.RpcError):
        list(call)
    return call


def refused(call: Any) -> Outcome:
    """The status of the refusal."""
    outcome = Outcome()
    read_status(outcome, call)
    return outcome


def within(field: int, content: bytes) -> bytes:
    """A field that holds a message of less than 128 bytes."""
    return bytes([field << 3 | 2, len(content)]) + content


# -- clients that know only the address ------------------------------------------------------------------------------


class _AddKey(grpc.StreamStreamClientInterceptor):
    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=(KEY,)), requests)


@pytest.fixture
def reflection(served: Served) -> Iterator[ProtoReflectionDescriptorDatabase]:
    yield ProtoReflectionDescriptorDatabase(grpc.intercept_channel(served.channel, _AddKey()))


def call_reflected(
    served: Served, reflection: ProtoReflectionDescriptorDatabase, name: str, request: dict[str, Any], *metadata: Any
) -> Any:
    """A response, or an iterator of responses, by the reflected types of `service/method`."""
    service, method = name.split("/")
    found = DescriptorPool(reflection).FindServiceByName(service).FindMethodByName(method)
    kind = served.channel.unary_stream if found.server_streaming else served.channel.unary_unary
    message = json_format.ParseDict(request, GetMessageClass(found.input_type)())
    decode = GetMessageClass(found.output_type).FromString
    call: Callable[..., Any] = kind(f"/{name}", lambda m: m.SerializeToString(), decode)
    return call(message, metadata=metadata, timeout=WAIT_S)


def test_by_reflection(served: Served, reflection: ProtoReflectionDescriptorDatabase) -> None:
    names = set(reflection.get_services())
    assert names == {INFERENCE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    responses = list(call_reflected(served, reflection, METHODS[0], {"text": "hello", "model": SERVED}, KEY))
    assert "".join(response.text for response in responses) == ANSWER
    assert [token for response in responses for token in response.token_ids] == served.engine.script.token_ids
    (model,) = call_reflected(served, reflection, f"{INFERENCE}/ListModels", {}, KEY).models
    assert (model.id, model.context_tokens) == (SERVED, CONTEXT)
    assert call_reflected(served, reflection, CHECK, {}).status == 1
    served.engine.unready = "no worker"
    assert call_reflected(served, reflection, CHECK, {"service": INFERENCE}).status == 2


def test_a_service_whose_health_is_not_known(served: Served) -> None:
    outcome = refused(ask(served, CHECK, b"\x0a\x05other"))
    assert (outcome.status, outcome.param) == (404, "service")


# -- whatever is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*METHODS, CHECK])
def test_every_call_has_a_request_id(served: Served, method: str) -> None:
    for request in (b"", b"\xff", UNKNOWN):
        for key in ((KEY,), ()):
            given = ask(served, method, request, *key, (ID, "call-1"))
            assert dict(given.initial_metadata())[ID] == "call-1"
            made = ask(served, method, request, *key)
            assert dict(made.initial_metadata())[ID].startswith("req-")
    outcome = refused(ask(served, method, b"\xff", KEY))
    assert (outcome.status, outcome.code) == (400, "invalid_message")
    assert outcome.message == "the request is no message of this method"
    assert not served.engine.generations or method.endswith("Generate")


LOCKED = (
    *METHODS, "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "grpc.health.v1.Health/Watch",
    f"/{CHECK}", f"{CHECK}/../Watch", "grpc.health.v1.Health/check", "baton.v1.Worker/Status", "nobody/knows",
)  # fmt: skip


@pytest.mark.parametrize("method", LOCKED)
def test_a_key_is_needed(served: Served, method: str) -> None:
    for wrong in ((), (("authorization", "Bearer wrong"),), (("authorization-bin", b"\xff"),)):
        outcome = refused(ask(served, method, b"", *wrong))
        assert (outcome.status, outcome.code) == (401, "invalid_api_key")
    assert not served.engine.generations


def test_a_bug_of_a_call_that_is_not_streamed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "decode", lambda *_, **__: 1 / 0)
    outcome = refused(ask(served, f"{INFERENCE}/Detokenize", b"\x12\x01\x05", KEY))
    assert (outcome.status, outcome.code) == (500, "bug")


# -- fields that are not known ---------------------------------------------------------------------------------------

HELLO = within(2, b"\x0a\x04user\x12\x05hello")
UNKNOWN_FIELDS: list[tuple[str, bytes, str, str, str]] = [
    *((method.partition("/")[2], UNKNOWN, f"{method.partition('/')[2]}Request", "111", "111") for method in METHODS),
    ("Generate", b"\x12\x01x" + UNKNOWN * 3 + b"\xe8\x07\x01", "GenerateRequest", "111, 125", "111"),
    ("Generate", b"\x10\x05", "GenerateRequest", "2", "2"),  # a string field, sent as a number
    ("Generate", within(3, b"\x0a\x01\x05" + UNKNOWN), "TokenIds", "111", "token_ids.111"),
    ("Generate", b"\x12\x01x\xa2\x01\x06\x12\x00" + UNKNOWN, "ResponseFormat", "111", "response_format.111"),
    ("Chat", HELLO + within(2, UNKNOWN), "ChatMessage", "111", "messages[1].111"),
    ("Chat", within(2, within(5, b"") + within(5, UNKNOWN)), "ToolCall", "111", "messages[0].tool_calls[1].111"),
    ("Chat", HELLO + b"\xc2\x01\x04" + UNKNOWN, "Tool", "111", "tools[0].111"),
    ("Tokenize", within(3, UNKNOWN), "ChatMessage", "111", "messages[0].111"),
]


@pytest.mark.parametrize(("method", "request_bytes", "message", "numbers", "param"), UNKNOWN_FIELDS)
def test_unknown_fields_are_named(
    served: Served, method: str, request_bytes: bytes, message: str, numbers: str, param: str
) -> None:
    outcome = refused(ask(served, f"{INFERENCE}/{method}", request_bytes, KEY))
    assert (outcome.status, outcome.code, outcome.param) == (400, "unknown_field", param)
    told = f"baton.v1.{message} has fields that are unknown here, or of another type: {numbers}; leave them out"
    assert outcome.message == told
    assert not served.engine.generations


ENTRY = b"\x08\x05" + UNKNOWN  # of a map


@pytest.mark.parametrize(
    ("method", "request_bytes", "reason", "told"),
    [
        ("Generate", b"\x12\x01x\x8a\x01" + bytes([len(ENTRY)]) + ENTRY, "unknown_field", ""),
        ("Chat", HELLO * 20_000, "body_too_complex", "more than 20000 messages"),
        ("Chat", within(2, within(5, b"") * 60) * 40_000, "body_too_complex", "more than 20000 messages"),
        ("Chat", HELLO + UNKNOWN * 20_000, "unknown_field", "ChatRequest has 80000 bytes in fields that are unknown"),
        ("Chat", HELLO + b"\xb8\x06\x01" * 4000 + UNKNOWN, "unknown_field", "another type: 103, 111;"),
        ("Chat", b"".join(bytes([128 + 8 * i, 2, 0]) for i in range(16)) + UNKNOWN, "unknown_field", " 32, 33, 35, 36"),
    ],
)  # fmt: skip
def test_how_much_is_looked_through_is_bounded(
    served: Served, method: str, request_bytes: bytes, reason: str, told: str
) -> None:
    outcome = refused(ask(served, f"{INFERENCE}/{method}", request_bytes, KEY))
    assert (outcome.status, outcome.code) == (400, reason)
    assert told in outcome.message and len(outcome.message) < 200
    assert not served.engine.generations


def test_messages_count_as_bodies_under_way(served: Served) -> None:
    """gRPC tells of a message when it is there: it counts until it is read."""
    held, message = served.held, b"\x12\xa0\x9c\x01" + b"x" * 20_000
    before, held.bytes.most = held.bytes.most, 24_000  # of which a key has three quarters
    try:
        outcome = refused(ask(served, f"{INFERENCE}/Generate", message, KEY))
        assert (outcome.status, outcome.code) == (429, "overloaded") and "too much at once" in outcome.message
    finally:
        held.bytes.most = before
    assert refused(ask(served, f"{INFERENCE}/Generate", message, KEY)).status != 429
    assert not held.bytes.total


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_CONNECTIONS", 3)
    server = rpc.build_server(more_options=service.bound_connections(WAIT_S))
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    hello = await streams[-1][0].read(9)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert hello and await asyncio.wait_for(reader.read(9), WAIT_S) == b"", "the fourth is refused"
    for _, one in [*streams, (reader, writer)]:
        one.close()
    await server.stop(None)


class Request:
    """Stands for a large message."""


class Context:
    """Keeps the error that ends the call, as gRPC's does."""

    error: BaseException | None = None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.error = grpc.aio.AbortError(details)
        raise self.error


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_refused_request_is_not_kept(is_streamed: bool) -> None:
    """It would be until a full garbage collection, which a gateway hardly makes."""

    async def refuse(request: Request, context: Any) -> None:
        try:
            raise ValueError("wrong")
        except ValueError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "wrong")

    async def stream(request: Request, context: Any) -> AsyncIterator[int]:
        await refuse(request, context)
        yield 1

    async def read(data: bytes, context: Any) -> Request:
        return requests.pop()

    request, context = Request(), Context()
    given: Any = context
    seen, requests = weakref.ref(request), [request]
    del request
    with pytest.raises(grpc.aio.AbortError):
        if is_streamed:
            await anext(_guard_generator(stream, read)(b"", given))
        else:
            await _guard(refuse, read)(b"", given)
    assert context.error is not None and seen() is None
