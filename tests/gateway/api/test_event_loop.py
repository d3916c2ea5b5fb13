"""However long an answer, the gateway's event loop is never blocked for long. Row 17 of the fault list.

The measure is the longest step's share of all CPU time, which is the same on a slow machine: 6 % at most.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import pytest
import structlog
from fastapi import FastAPI
from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry

from demo.paths import TARGET_DIR
from gateway.access.keys import Keys
from gateway.api.grpc.message_parts import check_parts
from gateway.api.grpc.requests import chat_request, generate_request
from gateway.app import add_model, build_app
from gateway.errors import ApiError
from gateway.fair_turns import FairTurns
from gateway.loop_watch import MAX_STEP_S, PERIOD_S, LoopWatch
from gateway.request.prepare import ApiOptions, ServedModels
from gateway.router import attempt
from gateway.text.tokenizer import Tokenizer
from protos import decode_pb2
from protos import inference_pb2 as pb
from runtime.lifecycle import spare_what_is_here
from tests.attack.cases import field, varint
from tests.support.fake_engine_client import FakeEngineClient, Script

MOST_SHARE = 0.125  # twice that
LONG_PROMPT = [7 + index % 200 for index in range(2000)]
MESSAGES = [{"role": "user", "content": "x"}]
ANSWER = [30 + index % 200 for index in range(120)]


@pytest.fixture(scope="module")
def as_in_a_gateway() -> Iterator[None]:
    """Hides what tests have loaded and gateways have not."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    spare_what_is_here()
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("as_in_a_gateway")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": [LONG_PROMPT] * 64, "echo": True, "logprobs": 5, "max_tokens": 1, "stream": True}),
        ("chat/completions", {"messages": MESSAGES, "n": 128, "logprobs": True, "top_logprobs": 20}),
    ],
    ids=["streamed echo", "chat n"],
)
def test_no_step_takes_long(monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]) -> None:
    engine, steps = FakeEngineClient(), list[float]()
    engine.script = Script(ANSWER, group=5)
    served = ServedModels(ApiOptions(), CollectorRegistry(), Keys())
    add_model(served, engine, Tokenizer(TARGET_DIR), ["demo"])
    app = build_app(served)

    async def test() -> None:
        await _post(app, "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})  # imports the rest
        steps.clear()
        await _post(app, f"/v1/{path}", {"model": "demo", "max_tokens": len(ANSWER), **fields})

    _measure_steps(monkeypatch, steps)
    asyncio.run(test())
    served.offload.close()
    assert max(steps) < MOST_SHARE * sum(steps)


@pytest.mark.usefixtures("as_in_a_gateway")
def test_a_long_conversation_is_tokenised_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """128k tokens: each step of the loop is a small share of the request's CPU time, most of it a thread's.

    Asked again, nothing is tokenised, unless the request has another salt.
    """
    steps, num_tokenised, tokenizer = list[float](), [0], Tokenizer(TARGET_DIR)
    tokenizer.context_tokens, tokenizer.template.max_bytes = 1 << 18, 1 << 23
    engine = FakeEngineClient()
    engine.script = Script(ANSWER, group=5)
    served = ServedModels(ApiOptions(), CollectorRegistry(), Keys())
    add_model(served, engine, tokenizer, ["demo"])
    app, took_s = build_app(served), 0.0
    texts = [" ".join(f"story {turn}.{at}: the fox {at * 7919 % 1000} runs" for at in range(20)) for turn in range(365)]
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    body = {"model": "demo", "messages": messages, "max_tokens": len(ANSWER), "stream": True}

    def count(texts: list[str], **options: bool) -> list[list[int]]:
        num_tokenised[-1] += sum(map(len, texts))
        return encode_all(texts, **options)

    encode_all = tokenizer.encode_all
    monkeypatch.setattr(tokenizer, "encode_all", count)

    async def test() -> None:
        nonlocal took_s
        await _post(app, "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})  # imports the rest
        await asyncio.sleep(0)
        steps.clear()
        began = time.process_time()
        await _post(app, "/v1/chat/completions", body)
        took_s = time.process_time() - began
        measured.extend(steps)
        num_tokenised.clear()
        for salt in ("", "another", "another"):
            num_tokenised.append(0)
            await _post(app, "/v1/chat/completions", {**body, "cache_salt": salt})

    measured = list[float]()
    _measure_steps(monkeypatch, steps)
    asyncio.run(test())
    served.offload.close()
    assert len(engine.generations[-1].prompt_ids) > 128_000
    assert max(measured) < MOST_SHARE * took_s
    assert num_tokenised[0] == num_tokenised[2] == 0 and num_tokenised[1] > sum(map(len, texts))


def _measure_steps(monkeypatch: pytest.MonkeyPatch, steps: list[float]) -> None:
    run = asyncio.Handle._run

    def run_measured(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        steps.append(time.thread_time() - started)

    monkeypatch.setattr(asyncio.Handle, "_run", run_measured)


# -- requests made to cost much: what one client sends holds up no other ---------------------------------------------

MB8 = 8_000_000
MANY = "[" + "[]," * (MB8 // 4) + "[]]"


def _call(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]}


def _tool(index: int, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{index}", "parameters": schema, "strict": True}}


def _one_of(index: int) -> Any:
    branches = [{"type": "object", "properties": {f"p{at}": {"const": at}}, "required": [f"p{at}"]} for at in range(19)]
    return {"type": "object", "properties": {"a": {"oneOf": branches}}}


def _said(item: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "x"}, item]}


ONE_OF = [_tool(at, _one_of(at)) for at in range(60)]
OLLAMAS_CALL = {"function": {"name": "f", "arguments": {}}}
HOSTILE: dict[str, tuple[str, Any]] = {
    "containers in arguments": ("chat/completions", _call(f'{{"a": {MANY}}}')),
    "containers in broken arguments": ("chat/completions", _call(MANY[:-1])),
    "allowed containers": ("chat/completions", _call('{"a": [' + ",".join(['{"b": []}'] * 9_900) + "]}")),
    "many calls": ("chat/completions", {"messages": _call('{"a": []}')["messages"] * 1000}),
    "numbers in arguments": ("chat/completions", _call('{"a": [' + "1.5," * (MB8 // 4) + "1]}")),
    "allowed numbers": ("chat/completions", _call('{"a": [' + "1.5," * 99_000 + "1]}")),
    "allowed strings": ("chat/completions", _call(json.dumps({"a": ["b\n"] * 49_000}))),
    "escapes": ("chat/completions", _call(json.dumps({"a": "\n" * (MB8 // 3)}))),
    "halves of pairs": ("chat/completions", _call('{"a": "' + "\\ud83d" * (MB8 // 7) + '"}')),
    "backslashes": ("chat/completions", _call('{"a": "' + "\\\\" * (MB8 // 4) + '"}')),
    "long numbers in arguments": ("chat/completions", _call('{"a": [' + ("9" * 4200 + ",") * 1900 + "1]}")),
    "depth": ("chat/completions", _call("[" * (MB8 // 2) + "]" * (MB8 // 2))),
    "items": ("responses", _said({"type": "function_call", "call_id": "c", "name": "f", "arguments": MANY})),
    "custom call": ("responses", _said({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": MANY})),
    "long numbers": ("chat/completions", '{"messages": [' + ("9" * 4200 + ",") * 1900 + "1]}"),
    "equal keys": ("chat/completions", '{"model": "demo", "x": {' + '"a": 1,' * 49_000 + '"a": 1}}'),
    "equal keys, deep": ("chat/completions", '{"a":[' + '{"b":{"c":1}},' * 9_000 + '{"b": 1, "b": 1}]}'),
    "tools with oneOf": ("chat/completions", {"messages": MESSAGES, "tools": ONE_OF}),
    "numbers in a schema": ("chat/completions", {"messages": MESSAGES, "tools": [_tool(0, {"enum": [1.5] * 99_000})]}),
    "kwargs": ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"a": [1.5] * 99_000}}),
    "a huge integer": ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"a": 10**127}}),
    "inputs": ("messages", {"max_tokens": 5, "messages": [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": [5] * 99_000}}]},
    ]}),
    "ids": ("completions", {"prompt": [list(range(250))] * 1_900}),
    "results of calls without ids": ("../api/chat", {"messages": [
        {"role": "assistant", "tool_calls": [OLLAMAS_CALL] * 4_600}, *[{"role": "tool", "tool_name": "f"}] * 4_000,
    ]}),
    "a context": ("../api/generate", {"prompt": "x", "context": [5] * 400_000}),
}  # fmt: skip


def _served() -> Iterator[tuple[FastAPI, ServedModels]]:
    engine = FakeEngineClient()
    engine.script = Script(ANSWER, group=5)
    served = ServedModels(ApiOptions(), CollectorRegistry(), Keys())
    add_model(served, engine, Tokenizer(TARGET_DIR), ["demo"])
    yield build_app(served), served
    served.offload.close()


served = pytest.fixture(_served, scope="module")


def _allowed_s() -> float:
    """MAX_STEP_S, or more on a slow or busy machine: a hundred times what it takes here to read a small body."""
    text, taken = "[" + "[]," * 50_000 + "[]]", list[float]()
    for _ in range(5):
        began = time.thread_time()
        json.loads(text)
        taken.append(time.thread_time() - began)
    return max(MAX_STEP_S, 100 * min(taken))


@pytest.mark.usefixtures("as_in_a_gateway")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_make_no_long_step(
    served: tuple[FastAPI, ServedModels], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.loop_watch.MAX_STEP_S", _allowed_s())
    monkeypatch.setattr(served[1].offload, "loop_turns", FairTurns(1))  # of another loop
    path, body = HOSTILE[name]
    data = body.encode() if isinstance(body, str) else json.dumps({"model": "demo", **body}).encode()

    async def test() -> int:
        watch = LoopWatch(CollectorRegistry())
        await _post_bytes(served[0], "/v1/completions", b'{"prompt": "x", "max_tokens": 1}')
        watch.start()
        await asyncio.sleep(2 * PERIOD_S)
        status = await _post_bytes(served[0], f"/v1/{path}".replace("/v1/..", ""), data)
        await asyncio.sleep(2 * PERIOD_S)
        watch.close()
        assert watch.num_long == 0
        return status

    assert asyncio.run(test()) in (200, 400, 413)


def _calls() -> bytes:
    call = field(1, b"c") + field(2, b"f") + field(3, b'{"a": [' + b"[]," * 4_000 + b"[]]}")
    return field(2, field(1, b"assistant") + field(5, call)) * 200


def _tools() -> bytes:
    tool = field(1, b"f") + field(3, b'{"a": [' + b"[]," * 4_000 + b"[]]}")
    return field(2, field(1, b"user")) + field(24, tool) * 127


GENERATE, CHAT = (pb.GenerateRequest, generate_request), (pb.ChatRequest, chat_request)
HOSTILE_MESSAGES: dict[str, tuple[type[Message], Callable[..., Any], Callable[[], bytes]]] = {  # gRPC's requests
    "images": (*CHAT, lambda: field(2, field(7, b"") * 4_000_000)),
    "images of many": (*CHAT, lambda: field(2, field(1, b"user") + field(7, b"") * 10) * 200_000),
    "ids": (*GENERATE, lambda: field(3, field(1, b"\x01" * MB8))),
    "allowed ids": (*GENERATE, lambda: field(3, field(1, b"\x01" * 90_000))),
    "a number without an end": (*GENERATE, lambda: b"\x80" * MB8),
    "groups": (*GENERATE, lambda: b"\x0b" * MB8),
    "stops": (*GENERATE, lambda: field(2, b"x") + field(10, b"") * 4_000_000),
    "stop ids": (*GENERATE, lambda: field(2, b"x") + field(11, b"\x01" * MB8)),
    "biases": (
        *GENERATE, lambda: field(2, b"x") + b"".join(field(17, b"\x08" + varint(at)) for at in range(1_000_000)),
    ),
    "arguments": (*CHAT, _calls),
    "tools": (*CHAT, _tools),
}  # fmt: skip


@pytest.mark.usefixtures("as_in_a_gateway")
@pytest.mark.parametrize("name", HOSTILE_MESSAGES)
def test_hostile_messages_make_no_long_step(name: str) -> None:
    kind, read, build = HOSTILE_MESSAGES[name]
    data, took_s, described = build(), list[float](), cast(Any, kind.DESCRIPTOR)

    def step(work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        try:
            return work()
        finally:
            took_s.append(time.thread_time() - began)

    with suppress(ApiError, DecodeError):
        step(lambda: check_parts(described, data, 4096))
        request = step(lambda: kind.FromString(data))
        step(lambda: read(request))
    assert max(took_s) < _allowed_s()


async def _post(app: FastAPI, path: str, body: dict[str, Any]) -> None:
    assert await _post_bytes(app, path, json.dumps(body).encode()) == 200


async def _post_bytes(app: FastAPI, path: str, body: bytes) -> int:
    """Returns the status."""
    messages = [{"type": "http.request", "body": body}]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }  # fmt: skip
    statuses = list[int]()

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    await app(scope, receive, send)
    return statuses[0]


async def test_others_get_turns_while_a_workers_long_message_is_read() -> None:
    """The log-probabilities of a long prompt come in one message."""
    made = [decode_pb2.TokenLogprobs(logprob=-at, top_ids=[at], top_logprobs=[-at]) for at in range(5000)]
    reading, turns = asyncio.create_task(attempt._unpack_logprobs(made)), 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= len(made) // attempt.READ_AT_ONCE
    found = [(one.logprob, one.top_ids, one.top_logprobs) for one in reading.result()]
    assert found == [(-at, (at,), (-at,)) for at in range(len(made))]
