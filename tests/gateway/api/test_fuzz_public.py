"""Whatever clients send to the public ports, they get an answer, or a client error in the documented shape."""

import copy
import json
import socket
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos import inference_pb2
from tests.support.adapters import APIS
from tests.support.api_server import SERVED, WAIT_S, Served
from tests.support.combinations import examples
from tests.support.messages import mutate
from tests.support.rest_adapters import Rest
from tests.support.tiny_tokenizer import CONTEXT
from tests.support.words import HELLO, TOOLS

# word |-> a value with which a request is answered; each API starts from those that it has
WORDS: dict[str, Any] = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "frequency_penalty": 0.5,
    "logprobs": 2, "logit_bias": {"5": 1.5}, "include_timing": True, "cache_salt": "x", "speculation": "off",
    "max_draft_tokens": 2, "form": {"json_schema": {"type": "object"}}, "parallel_tool_calls": True, "tools": TOOLS,
    "tool_choice": "none", "prompt": "hello", "system": "hm", "messages": [
        *HELLO, {"role": "assistant", "content": "y", "calls": [{"id": "a", "name": "now", "arguments": "{}"}]},
        {"role": "tool", "tool_call_id": "a", "content": "b"}, *HELLO],
    "stop": ["a", "b"], "max_tokens": 3, "priority": 9, "deadline_ms": 60_000, "user": "me",
}  # fmt: skip


def start(name: str) -> dict[str, Any]:
    """A request with all that the API knows of these words."""
    api = APIS[name]
    return api.body({word: value for word, value in WORDS.items() if api.knows({word: value})})


STARTS: dict[str, dict[str, Any]] = {
    **{f"v1/{api.path}": start(name) for name, api in APIS.items() if isinstance(api, Rest)},
    "tokenize": {"messages": start("chat")["messages"], "add_generation_prompt": False, "return_token_strs": True},
    "detokenize": {"model": SERVED, "tokens": [5, 6, 300]},
    "api/chat": {
        "model": SERVED, "format": "json", "think": False, "keep_alive": "5m", "logprobs": True, "top_logprobs": 2,
        "options": {"temperature": 0.5, "top_k": 5, "seed": 7, "stop": ["a", "b"], "num_predict": 3, "num_ctx": 4096},
        "tools": [{"type": "function", "function": tool} for tool in TOOLS], "messages": [
            *HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
            {"role": "tool", "tool_name": "now", "content": "b"}, *HELLO],
    },
    "api/generate": {"model": SERVED, "prompt": "hello", "system": "hm", "context": [5, 6], "stream": False},
}  # fmt: skip
TOO_LATE = "deadline_ms"  # a changed deadline may be one that nobody keeps
KEYS = [
    "stream", "stream_options", "n", "logprobs", "tools", "tool_choice", "echo", "chat_template", "kv_transfer_params",
    "__proto__", "stop_token_ids", "ignore_eos", "messages", "prompt", "role", "content", "name", "tool_calls", "é", "",
    "response_format", "structured_outputs", "json", "json_schema", "type", "min_tokens", "input", "text", "reasoning",
    "call_id", "output", "system", "input_schema", "is_error", "tokens",
]  # fmt: skip
fuzz = settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))

EDGES: list[Any] = [
    None, True, 0, -1, 2, 2**63, 10**30, -0.5, float("nan"), float("inf"), "", "x", "\0", "\ud800", "🙂" * 50,
    "<|end|>", "user", "x" * 5000, [], {}, [[]], [None], ["x"] * 40, [0, 1, 2], [2**40], {"type": "json_object"},
]  # fmt: skip
json_values = st.sampled_from(EDGES) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn, start: dict[str, Any]) -> bytes:
    """A valid body with a few changes, and sometimes a byte that is invalid in JSON."""
    body = copy.deepcopy(start)
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, body)
    text = json.dumps(body).encode()
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    return text


def _change(draw: st.DrawFn, place: Any) -> None:
    """Change one place of a dict or list, at any depth."""
    keys = [*place, *KEYS] if isinstance(place, dict) else list(range(len(place)))
    if not keys:
        return
    key = draw(st.sampled_from(keys))
    child = place.get(key) if isinstance(place, dict) else place[key]
    if isinstance(child, dict | list) and child and draw(st.booleans()):
        _change(draw, child)
    elif draw(st.integers(0, 4)) == 0 and isinstance(place, dict):
        place.pop(key, None)
    else:
        place[key] = copy.deepcopy(draw(json_values))


@pytest.fixture(autouse=True)
def long_answers(served: Served) -> None:
    """Answers that only limits and stop strings end."""
    served.engine.reset(served.script("fine " * CONTEXT, ends=False))


def check_answer(served: Served, path: str, body: bytes) -> None:
    answer = served.http.post(f"/{path}", content=body, headers={"content-type": "application/json"})
    if answer.status_code == 200:
        assert b'"error":{' not in answer.content and b'{"error":' not in answer.content, answer.content
        return
    error, is_own = answer.json()["error"], path == "v1/messages"
    if path.startswith("api/"):
        assert answer.json().keys() == {"error"} and answer.status_code in (400, 404)
        assert 0 < len(error) < 1000
        return
    assert answer.json().keys() == ({"type", "error"} if is_own else {"error"})
    assert error.keys() == ({"type", "message"} if is_own else {"message", "type", "param", "code"})
    if TOO_LATE not in error["message"]:
        assert error["type"] == {400: "invalid_request_error", 404: "not_found_error"}[answer.status_code]
    assert 0 < len(error["message"]) < 1000


@pytest.mark.parametrize("path", STARTS)
def test_changed_bodies_any_bytes_and_any_json(served: Served, path: str) -> None:
    check_answer(served, path, json.dumps(STARTS[path]).encode())
    anything = st.binary(max_size=80) | json_values.map(lambda value: json.dumps(value).encode())
    for strategy in (bodies(STARTS[path]), anything):

        @fuzz
        @given(strategy)
        def ask(body: bytes) -> None:
            check_answer(served, path, body)

        ask()


def test_bytes_that_are_no_http(served: Served) -> None:
    """The connection is closed or answered by a 4xx; the server still serves."""

    @settings(fuzz, max_examples=examples(30))
    @given(
        st.binary(min_size=1, max_size=200) | st.binary(max_size=60).map(lambda tail: b"POST /v1/completions " + tail)
    )
    def send(data: bytes) -> None:
        with socket.create_connection(served.host_port, timeout=WAIT_S) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            answer = raw.recv(4096)
            assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer

    send()
    check_answer(served, "v1/completions", json.dumps(STARTS["v1/completions"]).encode())


GRPC_BLAMES = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
CALLS: list[Message] = [
    json_format.ParseDict(start("Generate"), inference_pb2.GenerateRequest()),
    json_format.ParseDict(start("Chat"), inference_pb2.ChatRequest()),
    inference_pb2.TokenizeRequest(text="hello", add_special_tokens=True),
    json_format.ParseDict({"messages": start("Chat")["messages"]}, inference_pb2.TokenizeRequest()),
    inference_pb2.DetokenizeRequest(token_ids=[5, 6, 300]),
]


@pytest.mark.parametrize("start", CALLS)
def test_grpc_calls(served: Served, start: Message) -> None:
    name = start.DESCRIPTOR.name.removesuffix("Request")
    method: grpc.UnaryStreamMultiCallable[bytes, bytes] = served.channel.unary_stream(f"/baton.v1.Inference/{name}")
    response = getattr(inference_pb2, f"{name}Response")

    def check(payload: bytes) -> None:
        call = method(payload, timeout=WAIT_S, metadata=served.metadata)
        with suppress(grpc.RpcError):
            assert all(response.FromString(part) is not None for part in call)
        assert call.code() in GRPC_BLAMES or TOO_LATE in call.details(), (call.code(), call.details())

    check(start.SerializeToString())

    @fuzz
    @given(mutate(start))
    def ask(message: Message) -> None:
        check(message.SerializeToString())

    @fuzz
    @given(st.binary(max_size=60) | st.binary(max_size=9).map(lambda tail: start.SerializeToString() + tail))
    def ask_rubbish(payload: bytes) -> None:
        check(payload)

    ask()
    ask_rubbish()
