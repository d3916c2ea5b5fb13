"""What every API refuses: with a status, the field's own name and a code, and never with a 500.

Tables: values that every API refuses, fields that one API refuses, and fields that have no effect and are accepted.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gateway.api.access import MAX_WARNING_CHARS, WARNING_HEADER, warning_headers
from gateway.api.http.body import Body, WarningBody
from gateway.api.http.body import warned as warned_fields
from runtime.peer_input import MAX_JSON_DEPTH
from tests.support.adapters import APIS
from tests.support.api_server import ANSWER, Served
from tests.support.tiny_tokenizer import CONTEXT, END
from tests.support.words import CALL, HELLO, TOOLS, Api, named

NAN, INF = float("nan"), float("inf")
VALUE, TYPE, MISSING, LONG = "invalid_value", "invalid_type", "missing_field", "context_length_exceeded"
UNKNOWN, UNSUPPORTED = "unknown_field", "unsupported_field"
GONE: Any = object()  # as a value: the field is omitted
CHATS = [APIS[name] for name in ("chat", "responses", "messages", "Chat")]


def said(role: str = "user", content: Any = "x", **fields: Any) -> list[Any]:
    """A conversation with this as its second message."""
    return [*HELLO, {"role": role, "content": content, **fields}]


def called(arguments: str = "{}", call_id: str = "x", name: str = "now") -> list[Any]:
    """A conversation whose second message has calls."""
    call = {"id": call_id, "name": name, "arguments": arguments}
    return [*said("assistant", "", calls=[call]), *HELLO]


def tool(name: str = "now", **fields: Any) -> list[Any]:
    return [{"name": name, **fields}]


def calls_of(**fields: Any) -> list[Any]:
    """The same in the form of chat completions."""
    call = {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}, **fields}
    return said("assistant", None, tool_calls=[call])


CLEAR = {"type": "clear_thinking_20251015"}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "crew", "tools": [{"type": "function", "name": "wait"}]}
CLAMPED = [("messages", "max_tokens", LONG)]  # lowered to the rest of the context instead
USED = {"type": "function_call", "call_id": "x", "name": "now", "arguments": "{}"}
USE = {"type": "tool_use", "id": "x", "name": "now", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "y"}


# fmt: off
# word |-> wrong values, optionally with the place that errors name and a code
VALUES: dict[str, list[Any]] = {
    "model": [("gpt-9", "model", "model_not_found")],
    "max_tokens": [-1, 0, (CONTEXT, "", LONG), (2**63 - 1, "", LONG), (2**63, "", LONG)],
    "temperature": [(-0.1, "", VALUE), (2.1, "", VALUE), NAN, INF],
    "top_p": [0, 1.01], "top_k": [-2], "min_p": [NAN, INF],
    "seed": [2**64, -(2**63) - 1],
    "frequency_penalty": [-2.1, NAN], "presence_penalty": [2.1, NAN], "repetition_penalty": [0, 2.1],
    "stop": [[""], ["x"] * 17, ["x", ""], ["x" * 10_000]],
    "stop_token_ids": [[10**6], [-1], [1] * 10_000],
    "n": [0, -1, 129, 10**9],
    "logprobs": [21, 10**6, -1],
    "min_tokens": [-1],
    "logit_bias": [({"1": 101}, ".1"), ({"1": -INF}, ".1"), {"9999": 1}, {"-1": 1},
                   {str(at): 1 for at in range(20_000)}],
    "speculation": ["tree"], "max_draft_tokens": [0, 17],
    "cache_salt": ["x" * 1025],
    "priority": [-1, 10, 2**63 - 1], "deadline_ms": [0, -1, 86_400_001, -(2**63)],
    "prompt": ["", ("word " * CONTEXT, "", LONG), ("x" * (16 * CONTEXT + 1), "", LONG),
               *(([bad], "_ids") for bad in (-1, 10**9)), ([], "_ids"), ([5] * CONTEXT, "_ids", LONG)],
    "form": [({"json_schema": {"const": "x" * 2**16}}, ".json_schema"),
             ({"json_schema": {"const": NAN}}, ".json_schema"),
             ({"regex": ""}, ".regex"), ({"regex": "a\0"}, ".regex"), ({"regex": "a" * (2**16 + 1)}, ".regex"),
             ({"grammar": "a" * (2**16 + 1)}, ".grammar"), ({"choice": []}, ".choice"),
             ({"choice": ["a", ""]}, ".choice"),
             ({"choice": ["\x7f" * 2**15] * 3}, ".choice"), ({"choice": ["word"] * 20_000}, ".choice")],
    "messages": [[], HELLO * 4097, (said("robot"), "[1].role"), (said(name="nobody"), ""),  # the template refuses
                 *(([{"role": "tool", "tool_call_id": bad, "content": "x"}], "[0].tool_call_id", code)
                   for bad, code in (("y", ""), ("", MISSING))),
                 (called(call_id=""), "[1].calls[0].id"), (called(name=""), "[1].calls[0].name"),
                 (said(content="word " * CONTEXT), "", LONG), (said(content="x" * (16 * CONTEXT + 1)), "", LONG),
                 *((called(bad), "[1].calls[0].arguments")
                   for bad in ("{", "[]", "NaN", '{"a": NaN}', "[" * 5000, "1" * 5000))],
    "tools": [*((tool(name), "[0].name") for name in ("a b", "x" * 65, "now\n", "")), (tool() * 2, "[1].name"),
              (tool(parameters={"type": "string"}), "[0].parameters"),
              (tool(parameters={"anyOf": [{}]}, strict=True), "[0].parameters"),
              [{"name": f"f{at}"} for at in range(129)], tool(description="x" * 300_000)],
    "tool_choice": ["required", ("now", "")],
}
PAIRS: list[tuple[Mapping[str, Any], str]] = [  # values that conflict, and the field that errors name
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"prompt": [5] * (CONTEXT - 1), "max_tokens": 2}, "max_tokens"),
    ({"tools": TOOLS, "tool_choice": "huh"}, "tool_choice.name"),
    ({"tools": tool(parameters={"enum": [1]}), "tool_choice": "required"}, "tools[0].parameters"),
    ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
    ({"tools": TOOLS, "parallel_tool_calls": False, "ignore_eos": True}, "ignore_eos"),
    *(({"tools": TOOLS, "tool_choice": "required", "form": form}, f"form.{kind}")
      for kind, form in (
          ("json_object", {"json_object": True}), ("json_schema", {"json_schema": {}}), ("regex", {"regex": "a"}))),
    *(({"form": {"json_schema": {"type": "null"}}, name: value}, name)
      for name, value in (("min_tokens", 1), ("ignore_eos", True))),
]

# API |-> its own field |-> wrong values, optionally with the place (from a dot or bracket on) or another field
OWN: dict[str, dict[str, list[Any]]] = {
    "chat": {
        "model": [(GONE, "", MISSING), 7, None],
        "messages": [
            (GONE, "", MISSING), "hi", (["hi"], "[0]", TYPE), ([{"content": "x"}], "[0].role", MISSING),
            ([{"role": "user"}], "[0].content", MISSING), (said(content=None), "[1].content"),
            (said(content=5), "[1].content"),
            (said(content=[{"type": "text", "text": 5}]), "[1].content[0].text"),
            (said(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "[1].content[0].image_url.url",
             UNSUPPORTED),
            (said(content=[{"type": "audio", "text": "x"}]), "[1].content[0].type", UNSUPPORTED),
            (said(nonsense=1), "[1].nonsense", UNKNOWN), (said("tool"), "[1].tool_call_id", MISSING),
            (said(refusal="x"), "[1].refusal", UNSUPPORTED),
            (said("assistant", None), "[1].content"), (said("assistant", None, tool_calls=[]), "[1].content"),
            (calls_of(function={"name": "now"}), "[1].tool_calls[0].function.arguments", MISSING),
            (calls_of(type="custom"), "[1].tool_calls[0].type"), (calls_of(id=None), "[1].tool_calls[0].id")],
        "max_tokens": [1.5, "9", True, (10**120, "", LONG)], "max_completion_tokens": [-1, (CONTEXT, "", LONG)],
        "temperature": [("hot", "", TYPE)], "top_k": [1.5], "seed": [1.5], "frequency_penalty": [True],
        "stop": ["", "x" * 10_000, (["x", 3], "[1]", TYPE)], "stop_token_ids": [(["x"], "[0]")], "ignore_eos": ["yes"],
        "stream": ["yes"], "stream_options": [{"include_usage": True}, ({"x": 1}, ".x", UNKNOWN)], "user": [5, ["me"]],
        "n": [10**120, (True, "", TYPE)], "min_tokens": [10**120], "max_draft_tokens": [10**120],
        "logprobs": [1], "top_logprobs": [10**6], "echo": [(True, "", UNSUPPORTED)],
        "logit_bias": [({"1": "x"}, ".1"), ({"one": 1}, ".one"), ({"01": 1}, ".01"), ({"\u0663": 1}, ".\u0663"),
                       ({"1" * 5000: 1}, "." + "1" * 100), [1]],
        "tools": ["now", ([{"type": "web_search"}], "[0].type"), ([{"type": "function"}], "[0].function", MISSING),
                  ([{"type": "function", "function": {}}], "[0].function.name", MISSING),
                  *(([{"type": "function", "function": {"name": "now", name: bad}}], f"[0].function.{name}")
                    for name, bad in (("parameters", []), ("strict", 1))),
                  ([{"type": "function", "function": {"name": "now", "extra": 1}}], "[0].function.extra", UNKNOWN),
                  ([{"type": "function", "function": {"name": "now", "parameters": {"a": NAN}}}], "")],
        "tool_choice": ["always", "auto", 7, ({"type": "function"}, ".function", MISSING)],
        "parallel_tool_calls": ["no"], "reasoning_effort": ["", "extreme", 1],
        "response_format": ["json_object", ({}, ".type", MISSING), ({"type": "xml"}, ".type"),
                            ({"type": "text", "x": 1}, ".x", UNKNOWN),
                            ({"type": "json_schema"}, ".json_schema", MISSING),
                            ({"type": "json_object", "json_schema": {"name": "x", "schema": {}}}, ".json_schema"),
                            ({"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
                             ".json_schema.schema")],
        "structured_outputs": [{}, {"regex": "a", "choice": ["a"]},
                               ({"structural_tag": "x"}, ".structural_tag", UNKNOWN),
                               ({"grammar": 5}, ".grammar"), ({"choice": ["a", 5]}, ".choice[1]"),
                               ({"json": "{"}, ".json"),
                               ({"json": "[" * 500}, ".json"), ({"json": 5}, ".json")],
        "chat_template": [("{{ 1 }}", "", UNKNOWN)], "kv_transfer_params": [({"host": "1.2.3.4"}, "", UNKNOWN)],
        "~one": [(1, "", UNKNOWN)], "x" * 500: [(1, "x" * 100, UNKNOWN)],
    },
    "completions": {
        "prompt": [(GONE, "", MISSING), None, [], ([""], "[0]"), ([[]], "[0]"), (["a", ""], "[1]"), ([[1], []], "[1]"),
                   ([[1], [10**9]], "[1]"), ([[1], [5] * CONTEXT], "[1]", LONG), ["a"] * 129, (["a", 1], "[1]"),
                   ([1, "a"], "[1]"),
                   ([1.5], "[0]"), ([True], "[0]"), ([[1], "a"], "[1]"), {"a": 1}, [10**30]],
        "messages": [(HELLO, "", UNKNOWN)], "max_completion_tokens": [(3, "", UNKNOWN)],
        "echo": [1], "logprobs": [True], "user": [5],
    },
    "responses": {
        "model": [(GONE, "", MISSING)], "user": [5],
        "input": [(GONE, "", MISSING), 7, [], (["x"], "[0]"), ([{"content": "x"}], "[0].role", MISSING),
                  ([{"role": "tool", "content": "x"}], "[0].role"),
                  *(([{"type": kind, "id": "x", "summary": []}], "[0].type", UNSUPPORTED)
                    for kind in ("item_reference",)),
                  ([{"type": ["message"]}], "[0].type"),
                  ([{"role": "user"}], "[0].content", MISSING),
                  ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
                   "[0].content[0].image_url", UNSUPPORTED),
                  ([{"role": "user", "content": [{"type": "input_text"}]}], "[0].content[0].text", MISSING),
                  ([{**HELLO[0], "huh": 1}], "[0].huh", UNKNOWN),
                  ([{**USED, "call_id": None}], "[0].call_id"),
                  ([{"type": "function_call_output", "call_id": "x"}], "[0].output", MISSING)],
        "reasoning": ["high", ({"effort": "extreme"}, ".effort")],
        "instructions": [7], "top_logprobs": [2], "metadata": [({"a": 1}, ".a")], "parallel_tool_calls": [1],
        "text": [({"format": {"type": "xml"}}, ".format.type"),
                 ({"format": {"type": "json_schema", "name": "x"}}, ".format.schema", MISSING),
                 ({"format": {"type": "text", "schema": {}}}, ".format.schema"),
                 ({"verbosity": "low"}, ".verbosity", UNSUPPORTED)],
        "tools": [([{"type": "mcp", "server_label": "x"}], "[0].type", UNSUPPORTED),
                  ([{**NAMESPACE, "tools": [{"type": "mcp"}]}], "[0].tools[0].type", UNSUPPORTED),
                  ([{**NAMESPACE, "tools": [{"type": "function", "name": "a b"}]}], "[0].tools[0].name"),
                  ([{"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "peg"}}],
                   "[0].format.syntax"),
                  ([{"type": "function"}], "[0].name", MISSING)],
        "tool_choice": ["always", ({"type": "mcp", "name": "now"}, ".type"),
                        ({"type": "allowed_tools", "mode": "none", "tools": []}, ".mode")], "n": [(2, "", UNKNOWN)],
    },
    "messages": {
        "model": [None], "max_tokens": [None, GONE, "3"],
        "messages": ["x", (["x"], "[0]"), ([{"role": "robot", "content": "x"}], "[0].role"),
                     ([{"role": "system", "content": [RESULT]}], "[0].content[0].type"),
                     *((said(content=[block]), f"[1].content[0]{place}") for block, place in [
                         ({"type": "image", "source": {}}, ".source.type"), ({"type": ["text"]}, ".type"), ("x", ""),
                         ({"type": "text", "text": "x", "huh": 7}, ".huh"),
                         ({"type": "text", "text": "x", "citations": [{}]}, ".citations"),
                         (USE, ".type"), ({**RESULT, "content": [{"type": "image"}]}, ".content[0].source"),
                         ({**RESULT, "tool_use_id": None}, ".tool_use_id")]),
                     (said(content=[{"type": "text", "text": "x"}, RESULT]), "[1].content[1]"),
                     *(([*said("assistant", [block]), *HELLO], f"[1].content[0]{place}") for block, place in [
                         (RESULT, ".type"), ({**USE, "input": "x"}, ".input")])],
        "system": [7, ([{"type": "image"}], "[0].type")], "stop_sequences": ["x"], "n": [2],
        "thinking": [({"type": "sometimes"}, ".type")],
        "context_management": [({"edits": [{"type": "compact_20260112"}]}, ".edits[0].type"),
                               *(({"edits": [{**CLEAR, "keep": bad}]}, f".edits[0].keep{place}") for bad, place in (
                                   ("some", ""), ({"type": "thinking_turns", "value": 0}, ".value")))],
        "output_config": [({"effort": "extreme"}, ".effort"), ({"effort": 7}, ".effort"),
                          ({"format": {"type": "xml"}}, ".format.type")],
        "tools": [([{"type": "computer_20250124", "name": "computer"}], "[0].type"),
                  ([{"name": "now"}], "[0].input_schema"),
                  ([{"name": "a", "input_schema": {}, "defer_loading": True}], "[0].defer_loading")],
        "tool_choice": ["auto", {"type": "auto"}, ({"type": "required"}, ".type"), ({"type": "tool"}, ".name"),
                        ({"type": "any", "name": "now"}, ".name")],
    },
    "Generate": {"text": [(GONE, "prompt", MISSING)], "responseFormat": [({}, "response_format", MISSING)]},
    "Chat": {
        "messages": [(said(""), "[1].role")], "toolChoice": [("auto", "tool_choice")],
        "chatTemplateKwargs": [("{", "chat_template_kwargs")],
        "tools": [*(([{"name": "a", "parameters": bad}], "[0].parameters") for bad in ("{", "[]", " " * 2**18 + "{}",
            "[" * 9999, '{"a": NaN}'))],
    },
}
OPEN = {"continue_final_message": True, "add_generation_prompt": False}
OWN_PAIRS: list[tuple[str, Mapping[str, Any], str]] = [
    ("chat", {"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ("chat", {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ("chat", {"tool_choice": "required", "tools": None}, "tool_choice"),
    *(("chat", {"stream": True, "stream_options": bad}, f"stream_options{place}")
      for bad, place in (({"include_usage": 1}, ".include_usage"), ([], ""))),
    ("chat", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("chat", {"messages": calls_of()[:2], **OPEN}, "messages"), ("chat", {"messages": HELLO, **OPEN}, "messages"),
    *((name, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs") for name in ("chat", "completions")),
    ("completions", {"prompt": ["a"] * 64, "n": 3}, "n"),
    ("completions", {"max_tokens": -1, "echo": True}, "max_tokens"),
    ("completions", {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
]
# API |-> path |-> values of fields without effect here that request what is missing
UNSUPPORTED_FIELDS: dict[str, dict[str, list[Any]]] = {
    "chat": {
        "modalities": [["text", "audio"], []], "audio": [{"voice": "alloy", "format": "wav"}, False],
        "prediction": [{"type": "content", "content": "x"}], "web_search_options": [{}], "moderation": [{}, "auto"],
        "verbosity": ["low", "high"], "service_tier": ["flex", ""], "functions": [[{"name": "f"}], {}],
        "function_call": [{"name": "f"}, "f"], "store": [True], "best_of": [2, True],
        "suffix": ["x"], "echo": [True, 0]},
    "responses": {
        "previous_response_id": ["resp_1"], "conversation": ["conv_1"], "store": [True], "background": [True],
        "prompt": [{"id": "x"}], "reasoning.summary": ["loud"], "truncation": ["auto"], "max_tool_calls": [1]},
    "messages": {
        "thinking": [{"type": "enabled", "budget_tokens": 1024}], "mcp_servers": [[{}]], "container": ["x"],
        "service_tier": ["priority"]},
    "completions": {"suffix": ["x"], "best_of": [2], "stream_options.include_obfuscation": [True]},
}
BLOCK = {"type": "text", "text": "x", "citations": None, "cache_control": {"type": "ephemeral"}}
HARMLESS: dict[str, dict[str, Any]] = {
    "chat": {
        "n": 1, "logprobs": False, "top_logprobs": None, "presence_penalty": 0, "logit_bias": {}, "tools": None,
        "parallel_tool_calls": True, "response_format": {"type": "text"}, "stop": None, "seed": None,
        "stream_options": None, "max_tokens": None, "user": "me", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "reasoning_effort": None, "cache_salt": None, "modalities": ["text"],
        "verbosity": "medium", "functions": [], "function_call": "none", "priority": 0, "best_of": 1, "suffix": "",
        "echo": False},
    "completions": {"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "n": 1, "stop": [],
                    "cache_salt": None},
    "responses": {
        "store": False, "previous_response_id": None, "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "include": [], "background": False, "service_tier": "auto", "user": "me", "safety_identifier": "me",
        "prompt_cache_key": "k",
        "text": {"verbosity": "medium"}, "tools": [], "tool_choice": None, "metadata": None, "stream_options": None,
        "top_logprobs": 0, "cache_salt": None},
    "messages": {
        "messages": [{"role": "user", "content": [BLOCK]}], "system": [BLOCK], "thinking": {"type": "disabled"},
        "metadata": {"user_id": "x"}, "service_tier": "auto", "container": None, "mcp_servers": [],
        "stop_sequences": None,
        "tool_choice": None, "output_config": {"effort": "high"}, "cache_salt": None,
        "tools": [{"name": "now", "input_schema": {}, "type": "custom", "defer_loading": False,
                   "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
NOT_HERE = "{} has no effect on this model"
NO_TOOLS = "tools[0] of the type {!r} is left out: no tools run here"
# API, what agents send, and the warning: the prompt is the same as without it; more in test_agents.py
LEFT_OUT: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"prompt_cache_retention": "x"} | ({"max_tokens": 9} if name == "completions" else {}),
       "prompt_cache_retention has no effect here")
      for name in ("chat", "completions", "responses")),
    ("chat", {"prompt_cache_options": {}}, "prompt_cache_options has no effect here"),
    ("responses", {"tools": [{"type": "image_generation"}], "tool_choice": "auto"},
     NO_TOOLS.format("image_generation")),
    ("messages", {"tools": [SEARCH]}, NO_TOOLS.format("web_search_20250305")),
    ("messages", {"tools": [SEARCH], "tool_choice": {"type": "auto"}}, NO_TOOLS.format("web_search_20250305")),
    ("messages", {"output_config": {"effort": "max"}}, NOT_HERE.format("output_config.effort")),
    ("responses", {"reasoning": {"effort": "high"}}, NOT_HERE.format("reasoning.effort")),
    *(("chat", {"reasoning_effort": effort}, NOT_HERE.format("reasoning_effort"))
      for effort in ("minimal", "low", "medium", "high")),
]
# fmt: on


@pytest.mark.parametrize(("name", "fields", "warning"), LEFT_OUT)
@pytest.mark.parametrize("stream", [False, True])
def test_what_agents_send_is_left_out_and_told(
    served: Served, name: str, fields: dict[str, Any], warning: str, stream: bool
) -> None:
    api = APIS[name]
    assert api.ask(served, {}).status == 200
    outcome = api.send(served, {**api.body({}), **fields}, stream)
    assert (outcome.status, outcome.headers[WARNING_HEADER]) == (200, warning)
    plain, sent = served.engine.sent
    assert sent["prompt_ids"] == plain["prompt_ids"]


@pytest.mark.parametrize(
    ("name", "tool", "forced"),
    [("messages", SEARCH, "web_search"), ("messages", SEARCH, None), ("responses", {"type": "web_search"}, None)],
)
def test_a_tool_that_is_left_out_cannot_be_required(served: Served, name: str, tool: Any, forced: str | None) -> None:
    api = APIS[name]
    choice = api.body({"tools": TOOLS, "tool_choice": forced or "required"})["tool_choice"]
    check_refused(api, served, {**api.body({}), "tools": [tool], "tool_choice": choice}, "tool_choice")


TOO_LONG = {  # in words that the clients of an API read
    "messages": r"prompt is too long: (\d+) tokens > 511 maximum; ",
    "responses": r"Your input exceeds the context window of this model: ",
}


@pytest.mark.parametrize("name", TOO_LONG)
@pytest.mark.parametrize("text", ["word " * CONTEXT, "x" * (16 * CONTEXT + 1)])
def test_a_prompt_that_is_too_long_is_refused_in_the_clients_words(served: Served, name: str, text: str) -> None:
    for stream in (False, True):
        outcome = APIS[name].ask(served, {"messages": said(content=text)}, stream)
        found = re.match(TOO_LONG[name], outcome.message)
        assert outcome.status == 400 and found, outcome.message
        assert all(int(number) > CONTEXT for number in found.groups())


def check_refused(api: Api, served: Served, body: Mapping[str, Any], path: str, code: str = "") -> None:
    """`code`: empty for a wrong value or type, or if prompt and answer are too long together."""
    outcome = api.send(served, body)
    assert outcome.status == (404 if code == "model_not_found" else 400), body
    assert 0 < len(outcome.message) < 500
    if api.tells_codes:
        assert outcome.param == path, outcome
        wrong = [VALUE, TYPE, LONG] if api.can_be_whole else [VALUE, LONG, MISSING]  # protobuf: empty texts are missing
        assert outcome.code in ([code] if code else wrong), outcome
    else:
        assert path in outcome.message or outcome.status == 404, (path, outcome)
    assert not served.engine.generations


def spread(value: Any) -> tuple[Any, str, str]:
    """The value, its place and its code in a table's entry."""
    value, place, code, *_ = (*value, "", "") if isinstance(value, tuple) else (value, "", "")
    return value, place, code


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize("word", VALUES)
def test_values(served: Served, api: Api, word: str) -> None:
    for value, place, code in map(spread, VALUES[word]):
        if api.knows({word: value}) and (api.name, word, code) not in CLAMPED:
            path = place if place.startswith(word) else f"{word}{place}"
            check_refused(api, served, api.body({word: value}), api.param(path), code)


@pytest.mark.parametrize(("asked", "path"), PAIRS)
def test_values_that_do_not_go_together(served: Served, asked: Mapping[str, Any], path: str) -> None:
    able = [api for api in APIS.values() if api.knows(asked)]
    assert able
    for api in able:
        check_refused(api, served, api.body(asked), api.param(path))


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in OWN.items() for field in fields])
def test_fields_of_one_api(served: Served, name: str, field: str) -> None:
    api = APIS[name]
    for value, place, code in map(spread, OWN[name][field]):
        path = f"{field}{place}" if not place or place[0] in ".[" else place
        body = {one: content for one, content in {**api.body({}), field: value}.items() if content is not GONE}
        check_refused(api, served, body, path, code)


@pytest.mark.parametrize(("name", "fields", "path"), OWN_PAIRS)
def test_fields_of_one_api_that_do_not_go_together(
    served: Served, name: str, fields: Mapping[str, Any], path: str
) -> None:
    check_refused(APIS[name], served, {**APIS[name].body({}), **fields}, path)


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, paths in UNSUPPORTED_FIELDS.items() for path in paths]
)
def test_what_is_not_supported_is_refused_by_name(served: Served, name: str, path: str) -> None:
    field, _, inner = path.partition(".")
    stream = {"stream": True} if field == "stream_options" else {}
    for value in UNSUPPORTED_FIELDS[name][path]:
        body = {**APIS[name].body({}), **stream, field: {inner: value} if inner else value}
        check_refused(APIS[name], served, body, path, UNSUPPORTED)


@pytest.mark.parametrize("name", HARMLESS)
def test_values_that_ask_for_nothing_are_accepted(served: Served, name: str) -> None:
    api = APIS[name]
    for fields in (HARMLESS[name], dict.fromkeys(UNSUPPORTED_FIELDS["chat"]) if name == "chat" else {}):
        outcome = api.send(served, {**api.body({}), **fields}, headers={"anthropic-version": "x"})
        assert outcome.status == 200, outcome
    sent = served.engine.sent[0]
    assert (sent["cache_salt"], sent["grammar"], sent["stop_token_ids"]) == ("", None, {END})


@pytest.mark.parametrize("api", [api for api in APIS.values() if api.can_be_whole], ids=named)
@pytest.mark.parametrize("salt", [7, ["x"], "\ud800"])
def test_salts_that_are_no_text(served: Served, api: Api, salt: Any) -> None:
    outcome = api.send(served, {**api.body({}), "cache_salt": salt})
    assert outcome.status == 400 and (salt == "\ud800" or "cache_salt" in outcome.message)
    assert not served.engine.generations


@pytest.mark.parametrize("api", CHATS, ids=named)
@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1, 150, 950, 5000])
def test_deep_json(served: Served, api: Api, depth: int) -> None:
    text = '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
    asked: list[tuple[Mapping[str, Any], str]] = [({"messages": called(text)}, "messages[1].calls[0].arguments")]
    if depth < 190:  # the maximum depth of a body is 200
        asked.append(({"tools": tool(parameters=json.loads(text))}, "tools[0].parameters"))
    elif api.name == "messages":
        asked.clear()
    for ask, path in asked:
        if depth > MAX_JSON_DEPTH:
            check_refused(api, served, api.body(ask), api.param(path))
        else:
            assert api.ask(served, ask).status == 200
            served.engine.reset(served.engine.script)


WORDS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
LOOSE = {"type": "object", "properties": {"words": WORDS}}
FINE = {"type": "object", "properties": {"words": {"type": "array"}}}


@pytest.mark.parametrize("api", APIS.values(), ids=named)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["form.json_schema", "tools[0].parameters"])
def test_parts_of_a_schema_that_cannot_be_enforced(served: Served, api: Api, stream: bool, path: str) -> None:
    """Refused under `strict`, otherwise a warning beside the answer."""
    problem = f"{api.param(path)} has 'uniqueItems' at #/properties/words"
    for schema, strict in ((LOOSE, False), (LOOSE, True), (FINE, False), (FINE, True)):
        forced = {
            "tools": [{"name": "now", "parameters": schema, **({"strict": True} if strict else {})}],
            "tool_choice": "required",
        }
        form = {"form": {"json_schema": schema, **({} if strict else {"strict": False})}, "max_tokens": 100}
        asked: Mapping[str, Any] = forced if "tools" in path else form
        if not api.knows(asked):
            continue
        outcome = api.ask(served, asked, stream)
        is_refused = strict and schema is LOOSE
        assert outcome.status == (400 if is_refused else 200), outcome
        assert not is_refused or problem in outcome.message
        warning = f"{problem}, which is not enforced" if schema is LOOSE and not strict else None
        assert outcome.headers.get(WARNING_HEADER) == warning


@pytest.mark.parametrize("stream", [False, True])
def test_completions_without_max_tokens_are_told_of_their_length(served: Served, stream: bool) -> None:
    """OpenAI's end after 16 tokens."""
    warning = "max_tokens is not given: an answer may take the rest of the context; 16 is what OpenAI's API would take"
    told = [("completions", {}, warning), ("completions", {"max_tokens": 5}, None), ("chat", {}, None)]
    for name, fields, warned in told:
        served.engine.reset(served.script(ANSWER))
        outcome = APIS[name].send(served, {**APIS[name].body({}), **fields}, stream)
        assert outcome.headers.get(WARNING_HEADER) == warned
        (sent,) = served.engine.sent
        assert sent["max_tokens"] == fields.get("max_tokens", served.tokenizer.context_tokens - len(sent["prompt_ids"]))


@pytest.mark.parametrize("api", CHATS, ids=named)
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "b"}])
def test_tools_that_need_not_fit_their_schemas_are_not_warned_of(
    served: Served, api: Api, choice: Mapping[str, Any]
) -> None:
    outcome = api.ask(served, {"tools": [*tool(parameters=LOOSE), *tool("b")], **choice})
    assert outcome.status == 200 and WARNING_HEADER not in outcome.headers


def test_what_is_warned_of_stands_in_bodies_that_can_say_so() -> None:
    def walk(body: type[Body]) -> Iterator[type[Body]]:
        yield body
        for one in body.__subclasses__():
            yield from walk(one)

    (mark,) = warned_fields("name").values()
    bodies = [body for body in walk(Body) if mark in (body.ignored or {}).values()]
    assert len(bodies) >= 6
    assert not [body for body in bodies if not issubclass(body, WarningBody)]


@pytest.mark.parametrize("name", ["a\r\nx-evil: 1", "größe\x00", "\ud800", "x" * 10_000])
def test_a_warning_is_a_header_whatever_the_schema_holds(name: str) -> None:
    (shown,) = warning_headers([name, "b"]).values()
    assert shown.isascii() and shown.isprintable() and len(shown) <= MAX_WARNING_CHARS
    assert not warning_headers([])


@pytest.mark.parametrize("api", CHATS, ids=named)
def test_a_model_without_tools(plain: Served, api: Api) -> None:
    check_refused(api, plain, api.body({"tools": TOOLS}), "tools")
    own = {"responses": "input", "messages": "messages"}.get(api.name, "messages[1].tool_calls")
    check_refused(api, plain, api.body({"messages": called()}), own)
    assert "chat template knows no" in api.ask(plain, {"tools": TOOLS}).message
    plain.engine.reset(plain.script(CALL))
    assert api.ask(plain, {"tools": TOOLS, "tool_choice": "none"}).texts == [CALL]
