"""/tokenize and /detokenize as vLLM's clients use them, and Tokenize and Detokenize over gRPC."""

import threading
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from protos import inference_pb2, inference_pb2_grpc
from tests.support.adapters import APIS
from tests.support.api_server import SERVED, WAIT_S, Served
from tests.support.grpc_adapters import read_status
from tests.support.tiny_tokenizer import CONTEXT
from tests.support.words import HELLO, TOOLS, Outcome

CHAT = APIS["chat"]
REST_TOOLS = CHAT.body({"tools": TOOLS})["tools"]
LONG, TYPE, MISSING = "context_length_exceeded", "invalid_type", "missing_field"


def post(served: Served, path: str, **fields: Any) -> Any:
    return served.http.post(f"/{path}", json=fields).raise_for_status().json()


def call(served: Served, method: str, **fields: Any) -> Any:
    """Over gRPC."""
    message = json_format.ParseDict(fields, getattr(inference_pb2, f"{method}Request")())
    stub = inference_pb2_grpc.InferenceStub(served.channel)
    return getattr(stub, method)(message, metadata=served.metadata, timeout=WAIT_S)


def test_a_text(served: Served) -> None:
    ids = served.ids("hello 🙂")
    for model in ({}, {"model": SERVED}, {"model": None}):
        answer = post(served, "tokenize", prompt="hello 🙂", **model)
        assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}
        told = call(served, "Tokenize", text="hello 🙂", **model)
        assert (list(told.token_ids), told.context_tokens) == (ids, CONTEXT)
    strings = post(served, "tokenize", prompt="hello world<|end|>", return_token_strs=True)
    assert "".join(strings["token_strs"]) == "helloĠworld<|end|>" and len(strings["token_strs"]) == strings["count"]
    assert post(served, "tokenize", prompt="")["tokens"] == list(call(served, "Tokenize", text="").token_ids) == []
    long = "word " * CONTEXT
    assert post(served, "tokenize", prompt=long)["count"] > CONTEXT
    assert len(call(served, "Tokenize", text=long, addSpecialTokens=False).token_ids) > CONTEXT
    assert not served.engine.generations


@pytest.mark.parametrize(("name", "path"), [("messages", "count_tokens"), ("responses", "input_tokens")])
def test_a_prompt_has_as_many_tokens_as_its_request(served: Served, name: str, path: str) -> None:
    asked = {"system": "be short", "tools": TOOLS}
    usage = APIS[name].ask(served, asked).usage
    body = {field: value for field, value in APIS[name].body(asked).items() if field != "max_tokens"}
    kind = {"object": "response.input_tokens"} if name == "responses" else {}
    assert usage is not None and post(served, f"v1/{name}/{path}", **body) == {**kind, "input_tokens": usage[0]}


@pytest.mark.parametrize("asked", [{}, {"tools": TOOLS}])
def test_a_conversation_has_as_many_tokens_as_its_request(served: Served, asked: dict[str, Any]) -> None:
    usage = CHAT.ask(served, asked).usage
    body = {name: value for name, value in CHAT.body(asked).items() if name != "model"}
    counted = post(served, "tokenize", **body)
    assert usage is not None and counted["count"] == usage[0]
    assert tuple(counted["tokens"]) == served.engine.sent[0]["prompt_ids"]
    told = call(served, "Tokenize", **{name: APIS["Chat"].body(asked)[name] for name in ("messages", *asked)})
    assert list(told.token_ids) == counted["tokens"]
    without = post(served, "tokenize", **body, add_generation_prompt=False)["tokens"]
    assert counted["tokens"][: len(without)] == without and len(without) == counted["count"] - 1


def test_there_and_back(served: Served) -> None:
    text = "<|user|>hello 🙂 world<|end|>"
    ids = post(served, "tokenize", prompt=text)["tokens"]
    assert post(served, "detokenize", tokens=ids) == {"prompt": text}
    assert call(served, "Detokenize", tokenIds=ids).text == "hello 🙂 world", "without control tokens"
    assert post(served, "detokenize", model=SERVED, tokens=[])["prompt"] == call(served, "Detokenize").text == ""
    post(served, "detokenize", tokens=[5] * CONTEXT)
    assert call(served, "Detokenize", model=SERVED, tokenIds=[5] * CONTEXT).text == ""


def test_long_work_leaves_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length that counts is what a template may print, whatever the field."""
    threads: dict[str, str] = {}
    for name in ("pieces", "conversation"):
        work = getattr(served.tokenizer, name)

        def noted(*args: Any, name: str = name, work: Any = work, **more: Any) -> Any:
            threads[name] = threading.current_thread().name
            return work(*args, **more)

        monkeypatch.setattr(served.tokenizer, name, noted)
    for size, is_offloaded in ((10, False), (5000, True)):
        post(served, "tokenize", prompt="\x00" * size, return_token_strs=True)
        assert threads["pieces"].startswith("tokenise") is is_offloaded
        for field in ("content", "name", "tool_call_id"):
            post(served, "tokenize", messages=[{"role": "user", "content": "x", field: "x" * size}])
            assert threads["conversation"].startswith("tokenise") is is_offloaded, field


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
    ("tokenize", {"prompt": 7}, "prompt"),
    ("tokenize", {"prompt": "x" * (16 * CONTEXT + 1)}, "prompt"),
    ("tokenize", {"prompt": "x", "tools": REST_TOOLS}, "tools"),
    ("tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    ("tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
    ("tokenize", {"prompt": "x", "huh": 1}, "huh"),
    ("tokenize", {"messages": []}, "messages"),
    ("tokenize", {"messages": [{**HELLO[0], "name": "x" * (16 * CONTEXT)}]}, "messages"),
    ("tokenize", {"messages": [{**HELLO[0], "tool_call_id": "x" * (16 * CONTEXT)}]}, "messages"),
    ("tokenize", {"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
    ("tokenize", {"messages": HELLO, "tools": [*REST_TOOLS, REST_TOOLS[0]]}, "tools[2].function.name"),
    ("tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
    ("tokenize", {"messages": HELLO, "continue_final_message": True}, "messages"),
    ("tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
    ("detokenize", {}, "tokens"),
    ("detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ("detokenize", {"tokens": [10**9]}, "tokens"),
    ("detokenize", {"tokens": [5] * (CONTEXT + 1)}, "tokens"),
    ("detokenize", {"tokens": [5], "huh": 1}, "huh"),
    ("Tokenize", {"text": "x", "messages": HELLO}, "text"),
    ("Tokenize", {"addSpecialTokens": True, "messages": HELLO}, "add_special_tokens"),
    ("Tokenize", {"text": "x", "tools": [{"name": "now"}]}, "tools"),
    ("Tokenize", {"text": "x" * (16 * CONTEXT + 1)}, "text"),
    ("Tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
    ("Detokenize", {"tokenIds": [10**12]}, "token_ids"),
    ("Detokenize", {"tokenIds": [5] * (CONTEXT + 1)}, "token_ids"),
    ("tokenize", {"model": "other", "prompt": "x"}, "model"),
    ("detokenize", {"model": "other", "tokens": []}, "model"),
    ("Tokenize", {"model": "other"}, "model"),
    ("Detokenize", {"model": "other"}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "fields", "param"), BAD)
def test_what_is_wrong_is_named(served: Served, where: str, fields: dict[str, Any], param: str) -> None:
    outcome = Outcome()
    if where.islower():
        answer = served.http.post(f"/{where}", json=fields)
        outcome.status, outcome.param = answer.status_code, answer.json()["error"]["param"]
    else:
        with pytest.raises(grpc.RpcError) as caught:
            call(served, where, **fields)
        read_status(outcome, caught.value)
    assert (outcome.status, outcome.param) == (404 if param == "model" else 400, param), outcome
