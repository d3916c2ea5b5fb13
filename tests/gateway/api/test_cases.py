"""Requests and their results, equal on every API that supports them, whole and streamed, however tokens arrive.

A case is one table entry: the request, what the engine answers, the expected result, and what must have reached
the engine. It runs on all APIs that can express it. Every case also checks token counts, ids and measurements.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from runtime.peer_input import MAX_JSON_DEPTH
from tests.support.adapters import APIS
from tests.support.api_server import ANSWER, Served
from tests.support.fake_engine_client import TIMING, Script, likely
from tests.support.tiny_tokenizer import CONTEXT, END, byte_token
from tests.support.words import CALL, HELLO, NOW, TOOLS, Api, Outcome
from wire.timing import Timing

A, B = byte_token("a"), byte_token("b")
SAMPLING: dict[str, float] = {
    "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "frequency_penalty": -0.5, "presence_penalty": 1.5,
    "repetition_penalty": 1.25,
}  # fmt: skip
TOLD_TIMING = {
    "queue_seconds": 0.5, "prefill_seconds": 1.5, "transfer_seconds": 2.5, "transfer_bytes": 5120, "transport": "grpc",
    "first_step_seconds": 3.5, "decode_seconds": 4.5, "cached_tokens": 1, "file_tokens": 3,
    "prefill_lent_tokens": 4, "decode_lent_tokens": 5, "draft_tokens": 9, "accepted_tokens": 7,
    "attempts": 2, "grammar_seconds": 5.5, "prefill_reason": "no prefill worker is alive",
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"naïve": {"const": 'a"b\x00'}}, "required": ["naïve"]}
HALF = r'{"city": "\ud83d"}'  # half of a surrogate pair, as a model may write it
CHATS = ("chat", "responses", "messages", "Chat")
NO_STOPS = ("responses",)  # APIs that do not report the stop string
MODES = [("whole", 3), ("streamed", 1), ("streamed", 1000)]  # and how many tokens arrive together


@dataclass(frozen=True)
class Case:
    """One request and its expected result."""

    name: str
    ask: Mapping[str, Any] = field(default_factory=dict)
    says: str | Sequence[int] = ANSWER  # text, followed by an end token, or tokens; of each choice
    text: str | Sequence[str] = ANSWER  # of the only choice, or of each
    calls: Sequence[tuple[str, Any]] = ()  # of all choices
    reason: str | Sequence[str] = "stop"  # of all choices, or of each
    named: Mapping[str, str] = field(default_factory=dict)  # reasons of APIs with other names
    reasoning: str = ""
    stop: str | int | None = None  # the request's stop string or token that is met
    sent: Mapping[str, Any] = field(default_factory=dict)  # what reaches the engine for the first choice
    grammar: tuple[str, str] | None = None  # the same: kind and text
    prompt: str | None = None  # the same: its tokens as text
    only: Sequence[str] = tuple(APIS)
    raw: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # API |-> its own fields
    hangs: bool = False  # the engine sends nothing more, not even the end
    timing: Timing = TIMING
    each: Sequence[str] = ()  # the engine's answers for the first choices, if they differ
    service: str = "full"


def call(text: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {text}}}\n</tool_call>'


def deep(depth: int) -> str:
    """An object of this depth."""
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


WEATHER = ("weather", {"city": "Köln 🙂"})
BOTH = f"Let me look. {CALL}\n{NOW}"
ULM = {"id": "x", "name": "weather", "arguments": '{"city": "Ulm"}'}
HISTORY = [
    *HELLO,
    {"role": "assistant", "content": "Look:", "calls": [ULM]},
    {"role": "tool", "tool_call_id": "x", "content": "sunny"},
    {"role": "user", "content": "and?"},
]
TOLD = '<|user|>hello<|end|><|assistant|>Look:xweather{"city": "Ulm"}<|end|><|tool|>xsunny<|end|><|user|>and?<|end|>'
LISTED = (
    '{"name": "weather", "description": "Get it.", "parameters": {"type": "object", "properties": {"city": {"type": '
    '"string"}}, "required": ["city"]}}{"name": "now", "parameters": {"type": "object"}}'
)
THOUGHT = [*HELLO, {"role": "assistant", "content": "hi", "reasoning": "Greet."}, *HELLO]
SAME_TOOLS = [TOOLS[0], {**TOOLS[1], "parameters": {"type": "object"}}]  # in Messages every tool has parameters
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
INPUT_PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
THREE: dict[str, Any] = {"speculation": "ngram", "max_draft_tokens": 4, "min_tokens": 3, "max_tokens": 20}

THINKING = [{"type": "thinking", "thinking": "Greet.", "signature": ""}, {"type": "text", "text": "hi"}]
THOUGHT_BLOCKS: list[Any] = [*HELLO, {"role": "assistant", "content": THINKING}]
LOOK = '<|user|>hello<|end|><|assistant|>Look:aweather{"city": "Köln 🙂"}bnow{}<|end|><|tool|>asunny<|end|>'
SKY = {"type": "namespace", "name": "sky", "tools": [{"type": "function", "name": "weather"}]}
SKY_SHOWN = '{"name": "sky__weather", "parameters": {"type": "object", "properties": {}}}'
CUSTOM = {"type": "custom", "name": "now", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}

# fmt: off
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]},
    {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
     "content": [{"type": "output_text", "text": "Look:", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Köln 🙂"}'},
    {"type": "function_call", "call_id": "b", "name": "now", "arguments": "", "id": "fc_1", "status": "completed"},
    {"type": "function_call_output", "call_id": "a", "output": "sunny"},
    {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
    {"type": "message", "role": "developer", "content": "go on"},
]
BLOCKS: list[Any] = [
    *HELLO,
    {"role": "assistant", "content": [
        {"type": "text", "text": "Look:"},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Köln 🙂"}},
        {"type": "tool_use", "id": "b", "name": "now", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "broken", "is_error": True},
        {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}]},
]
CASES = [
    Case("text", prompt=None, sent={"grammar": None, "num_logprobs": None, "num_prompt_logprobs": None}),
    Case("nothing", says="", text=""),
    Case("system and user", {"system": "be short"},
         prompt="<|system|>be short<|end|><|user|>hello<|end|><|assistant|>"),
    Case("a developer is the system to most templates", {"messages": [{"role": "developer", "content": "d"}, *HELLO]},
         only=("chat", "responses", "Chat"), prompt="<|system|>d<|end|><|user|>hello<|end|><|assistant|>"),
    Case("who said it", {"messages": [{**HELLO[0], "name": "me"}]}, only=("chat", "Chat"),
         prompt="<|user|>mehello<|end|><|assistant|>"),
    Case("content in parts", prompt="<|user|>ab<|end|><|assistant|>", raw={
        "chat": {"messages": [{"role": "user", "content": PARTS}]},
        "responses": {"input": [{"role": "user", "content": INPUT_PARTS}]},
        "messages": {"messages": [{"role": "user", "content": PARTS}]}}),
    Case("token ids", {"prompt": [5, 6, 7]}, sent={"prompt_ids": (5, 6, 7)}),
    Case("a list of one prompt", raw={"completions": {"prompt": [[5, 6, 7]]}}, sent={"prompt_ids": (5, 6, 7)}),
    Case("NUL", {"prompt": "a\0b"}, prompt="a\0b"),
    Case("the longest prompt", {"prompt": [5] * (CONTEXT - 1)}, says="xyz", text="x", reason="length",
         sent={"max_tokens": 1}),

    # ends
    Case("the limit", {"max_tokens": 3}, says="xyzxyz", text="xyz", reason="length", sent={"max_tokens": 3}),
    Case("no limit but the context", {"prompt": [5]}, sent={"max_tokens": CONTEXT - 1}),
    Case("a stop string", {"stop": ["never", "STOP", "TOP"]}, "one two STOP three", "one two ", stop="STOP",
         hangs=True),
    Case("a stop string with a space", {"stop": [" STOP"]}, says="one two STOP three", text="one two", stop=" STOP"),
    Case("one stop string, not in a list", says="one two STOP", text="one two ", stop="STOP",
         raw={"chat": {"stop": "STOP"}, "completions": {"stop": "STOP"}}),
    Case("stop tokens have no text, and an end may be passed", {"stop_token_ids": [B], "ignore_eos": True},
         says=[A, END, B, A], text="a", stop=B,
         sent={"stop_token_ids": {B}}),
    Case("stop tokens besides the model's", {"stop_token_ids": [B]}, sent={"stop_token_ids": {B, END}}),

    # how tokens are chosen
    Case("sampling", SAMPLING, sent=SAMPLING),
    Case("sampling in few words", {"temperature": 0, "top_p": 0.5}, sent={"temperature": 0.0, "top_p": 0.5}),
    Case("top_k that keeps all", {"top_k": -1}, sent={"top_k": 0}),
    Case("top_k of more than there are", {"top_k": 10**9}, sent={"top_k": 0}),
    Case("a seed below zero", {"seed": -1}, sent={"seed": 2**64 - 1}),
    Case("biases", {"logit_bias": {"7": -100, "5": 1.5}}, sent={"logit_bias": ((5, 1.5), (7, -100.0))}),
    Case("drafts and lengths", THREE, sent={
        "speculation": {"drafter": "ngram", "max_draft_tokens": 4}, "min_tokens": 3, "max_tokens": 20}),
    *(Case(f"cache salt of {len(salt)}", {"cache_salt": salt}, sent={"cache_salt": salt}) for salt in ("", "ä" * 1024)),
    Case("when it is wanted", {"priority": 0, "deadline_ms": 60_000}, sent={"priority": 0, "owner": "key-1"}),
    Case("for whom", {"user": "me"}, sent={"priority": 5, "deadline_s": None, "owner": "user-45d7c8ad"}),

    # forms
    Case("JSON", {"form": {"json_object": True}}, grammar=("json_object", "")),
    Case("a schema", {"form": {"json_schema": SCHEMA}},
         grammar=("json_schema", json.dumps(SCHEMA, ensure_ascii=False))),
    Case("an expression", {"form": {"regex": "(a+)+$"}}, grammar=("regex", "(a+)+$")),
    Case("a grammar", {"form": {"grammar": 'root ::= "a"'}}, grammar=("ebnf", 'root ::= "a"')),
    Case("choices", {"form": {"choice": ["yes", 'n"o\\']}}, grammar=("ebnf", r'root ::= "yes" | "n\u0022o\u005c"')),
    *(Case(f"structured_outputs.json as {type(schema).__name__}", grammar=("json_schema", '{"type": "null"}'),
           raw={"completions": {"structured_outputs": {"json": schema}, "response_format": {"type": "text"}}})
      for schema in ({"type": "null"}, '{"type": "null"}')),
    Case("no form", raw={"responses": {"text": {"format": {"type": "text"}}}}, sent={"grammar": None}),
    Case("control tokens are not shown", says="a<|user|>b<|system|>", text="ab"),
    Case("control tokens that a grammar names are", {"form": {"regex": r"a<\|user\|>b|a<|user|>b"}},
         says="a<|user|>b<|system|>", text="a<|user|>b"),

    # calls
    Case("a call", {"tools": TOOLS}, CALL, "", [WEATHER], "tool_calls", sent={"grammar": None}),
    Case("text and calls", {"tools": TOOLS}, BOTH, "Let me look.", [WEATHER, ("now", {})], "tool_calls"),
    Case("auto", {"tools": TOOLS, "tool_choice": "auto"}, CALL, "", [WEATHER], "tool_calls", sent={"grammar": None}),
    *(Case(f"no call: {text!r}", {"tools": TOOLS}, text, text)
      for text in ("hello world", "1 < 2 <tool", CALL.replace("weather", "huh"), CALL.replace("}}", "}"))),
    Case("none leaves tools out", {"tools": TOOLS, "tool_choice": "none"}, CALL, CALL,
         prompt="<|user|>hello<|end|><|assistant|>"),
    Case("none without tools", {"tool_choice": "none"}, CALL, CALL, only=CHATS),
    Case("any call", {"tools": TOOLS, "tool_choice": "required"}, NOW, "", [("now", {})], "tool_calls"),
    Case("this call", {"tools": TOOLS, "tool_choice": "now"}, NOW, "", [("now", {})],
         named={"responses": "tool_calls", "messages": "tool_calls"}),
    Case("calls of each choice", {"tools": TOOLS, "n": 3}, each=(CALL, "no", BOTH), text=("", "no", "Let me look."),
         calls=[WEATHER, WEATHER, ("now", {})], reason=("tool_calls", "stop", "tool_calls")),
    *(Case(f"forced, cut off early: {choice} {limit}", {"tools": TOOLS, "tool_choice": choice, **limit}, CALL, "",
           reason="stop" if "stop" in limit else "length", stop='"name' if "stop" in limit else None)
      for choice in ("required", "weather") for limit in ({"max_tokens": 1}, {"max_tokens": 4}, {"stop": ['"name']})),
    Case("history", {"messages": HISTORY, "system": "be short", "tools": SAME_TOOLS},
         prompt=f"{LISTED}<|system|>be short<|end|>{TOLD}<|assistant|>"),
    Case("items of a conversation", raw={"responses": {"instructions": "be short", "input": ITEMS}},
         prompt=f"<|system|>be short<|end|>{LOOK}<|tool|>bnoon<|end|><|system|>go on<|end|><|assistant|>"),
    Case("blocks of a conversation", raw={"messages": {"messages": BLOCKS, "system": [
        {"type": "text", "text": "be "}, {"type": "text", "text": "short"}]}},
         prompt=f"<|system|>be short<|end|>{LOOK}<|tool|>bError: broken<|end|><|user|>and?<|end|><|assistant|>"),
    Case("history without tools", {"messages": HISTORY}, prompt=f"{TOLD}<|assistant|>"),
    Case("half of a surrogate pair in the history", {"messages": [*HISTORY[:1], {**HISTORY[1], "calls": [
        {"id": "x", "name": "weather", "arguments": HALF}]}, *HISTORY[2:]]}, only=("chat", "responses", "Chat"),
         prompt=TOLD.replace("Ulm", "\ufffd") + "<|assistant|>"),
    *(Case(f"JSON beside tools: {says!r}", {"tools": TOOLS, "form": {"json_object": True}}, says, text, only=CHATS)
      for says, text in (('{"a":\n"x\ny"}', '{"a":\n"x\\u000ay"}'), ('{"a": "\\ud83d\\', '{"a": "\\ud83d\\'))),
    *(Case(f"a call in a form: {said[:9]!r}", {"tools": TOOLS, "form": form}, said, said, only=CHATS)
      for form, said in (({"json_object": True}, json.dumps({"a": CALL})), ({"regex": ".*"}, f"So: {CALL}"))),
    Case("a call beside a form", {"tools": TOOLS, "form": {"regex": ".*"}}, f"\n{CALL}", "", [WEATHER], "tool_calls",
         only=CHATS),
    Case("half of a surrogate pair", {"tools": TOOLS}, call(HALF), "", [("weather", {"city": "\ufffd"})], "tool_calls"),
    Case("as deep as it may be", {"tools": TOOLS}, call(deep(MAX_JSON_DEPTH)), "",
         [("weather", json.loads(deep(MAX_JSON_DEPTH)))], "tool_calls"),
    Case("deeper than could be sent back", {"tools": TOOLS}, call(deep(MAX_JSON_DEPTH + 1)),
         call(deep(MAX_JSON_DEPTH + 1))),

    # reasoning before the answer, and answers that continue a message
    *(Case(f"reasoning {name}", {"stop": ["Greet"]} if name == "hides stop strings" else ask,
           f"<think>\nGreet.\n</think>\n\n{says}",
           text, calls, reason, reasoning="Greet.", service="thinking", only=only)
      for name, ask, says, text, calls, reason, only in (
          ("and an answer", {}, "hello", "hello", (), "stop", CHATS),
          ("hides stop strings", {}, "hello", "hello", (), "stop", ("chat", "messages", "Chat")),
          ("and a call", {"tools": TOOLS, "max_tokens": 150}, CALL, "", [WEATHER], "tool_calls", CHATS))),
    Case("reasoning that the limit cuts off", {"max_tokens": 4}, "<think>xyzxyz", "", reason="length",
         reasoning="xyz", service="thinking", only=CHATS),
    Case("reasoning is off", {"thinks": False}, "hello", "hello", service="thinking", only=CHATS,
         prompt="<|user|>hello<|end|><|assistant|><think>\n\n</think>\n\n"),
    Case("reasoning is on", {"thinks": True}, "hello", "hello", service="thinking", only=CHATS,
         prompt="<|user|>hello<|end|><|assistant|>"),
    *(Case(f"reasoning in the history: {service}", {"messages": THOUGHT}, service=service, only=CHATS,
           prompt=f"<|user|>hello<|end|><|assistant|>{shown}hi<|end|><|user|>hello<|end|><|assistant|>")
      for service, shown in (("thinking", "<think>\nGreet.\n</think>\n\n"), ("full", ""))),
    Case("a last message is gone on with",
         {"messages": [*HELLO, {"role": "assistant", "content": "The"}], "continues": True},
         " answer", " answer", prompt="<|user|>hello<|end|><|assistant|>The", only=("chat", "messages", "Chat")),

    # what agents send
    *(Case(f"the system in mid-conversation: {service}", {"messages": [*HELLO, {"role": "system", "content": "now"}]},
           only=CHATS, service=service, prompt=f"<|user|>hello{shown}<|assistant|>")
      for service, shown in (("full", "<|end|><|system|>now<|end|>"),
                             ("system_first", "\n\n<system>\nnow\n</system><|end|>"))),
    Case("several messages of the system at the start", {"messages": [
        {"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *HELLO]},
         only=("chat", "responses", "Chat"), service="system_first",
         prompt="<|system|>a\n\nb<|end|><|user|>hello<|end|><|assistant|>"),
    Case("reasoning of two turns is cleared but for one", raw={"messages": {
        "messages": [*THOUGHT_BLOCKS, *THOUGHT_BLOCKS, *HELLO],
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}}, service="thinking",
         prompt="<|user|>hello<|end|><|assistant|>hi<|end|><|user|>hello<|end|><|assistant|><think>\nGreet.\n</think>"
                "\n\nhi<|end|><|user|>hello<|end|><|assistant|>"),
    Case("reasoning as the model does by itself", raw={"messages": {"thinking": {"type": "adaptive"}}},
         service="thinking", prompt="<|user|>hello<|end|><|assistant|>"),
    Case("an effort that the template reads", service="thinking", prompt="<|user|>hello<|end|><|assistant|>[max]", raw={
        "messages": {"output_config": {"effort": "max"}}, "chat": {"reasoning_effort": "max"},
        "responses": {"reasoning": {"effort": "max", "summary": "auto"}}}),
    Case("a call in a namespace", says=CALL.replace("weather", "sky__weather"), text="", calls=[WEATHER],
         reason="tool_calls", raw={"responses": {"tools": [SKY]}}),
    Case("calls in a namespace, in the history", raw={"responses": {"tools": [SKY], "input": [
        *HELLO, {"type": "function_call", "call_id": "x", "name": "weather", "namespace": "sky", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x", "output": "sunny"}]}},
         prompt=f"{SKY_SHOWN}<|user|>hello<|end|><|assistant|>xsky__weather{{}}<|end|>"
                "<|tool|>xsunny<|end|><|assistant|>"),
    Case("a custom tool's call", says=NOW.replace("{}", '{"input": "*** a\\n"}'), text="",
         calls=[("now", {"input": "*** a\n"})], reason="tool_calls", raw={"responses": {"tools": [CUSTOM]}}),
    Case("a custom tool's call of another form", says=NOW.replace("{}", '{"patch": 1}'), text="",
         calls=[("now", {"input": '{"patch": 1}'})], reason="tool_calls", raw={"responses": {"tools": [CUSTOM]}}),
    Case("a custom tool's call that breaks", says=NOW.replace("{}", '{"input": "say "a'), text="",
         calls=[("now", {"input": "say "})], raw={"responses": {"tools": [CUSTOM], "tool_choice": "required"}}),
    Case("a custom tool's call in the history", raw={"responses": {"input": [
        *HELLO, {"type": "custom_tool_call", "call_id": "x", "name": "now", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "x", "output": "done"}]}},
         prompt='<|user|>hello<|end|><|assistant|>xnow{"input": "a\\nb"}<|end|><|tool|>xdone<|end|><|assistant|>'),

    # several choices, and the details of each
    Case("choices", {"n": 3, "seed": -2}, text=[ANSWER] * 3),
    Case("most choices", {"n": 128, "stop": ["x" * 1024] * 16}, says="hi", text=["hi"] * 128,
         only=("completions", "Generate")),
    *(Case(f"log-probabilities of {num}", {"logprobs": num, "n": 2}, text=[ANSWER] * 2,
           sent={"num_logprobs": num, "num_prompt_logprobs": None}) for num in (0, 1, 20)),
    Case("token ids", {"return_token_ids": True, "n": 2}, text=[ANSWER] * 2),
    Case("timing", {"include_timing": True, "n": 2}, text=[ANSWER] * 2),

    # a completion continues where its prompt ends, even after a space; a chat's answer begins a text
    Case("the first space", {"prompt": "hello world"}, " how are you", " how are you", service="sentence"),
    *(Case(f"a stop string beside it: {stop!r}", {"prompt": "hello world", "stop": [stop]}, " how are you", text,
           stop=stop, service="sentence") for stop, text in ((" how", ""), (" how are", ""), ("w are", " ho"))),
    Case("a chat begins anew", says=" how are you", text="how are you", service="sentence",
         only=CHATS),
]
# fmt: on
RUNS = [
    pytest.param(case, api, *mode, id=f"{case.name}-{api.name}-{mode[0]}-{mode[1]}")
    for case in CASES
    for api in APIS.values()
    for mode in MODES
    if (api.name in case.raw if case.raw else api.name in case.only and api.knows(case.ask))
    if mode[0] == "streamed" or api.can_be_whole
    if mode[1] < 1000 or api.name in ("chat", "Chat")
]


@pytest.mark.parametrize(("case", "api", "mode", "group"), RUNS)
def test_case(request: pytest.FixtureRequest, case: Case, api: Api, mode: str, group: int) -> None:
    served: Served = request.getfixturevalue(case.service)
    script = _script(case, served, group)
    served.engine.reset(script, *(served.script(text, group=group) for text in case.each))
    before = measured(served)
    body = {**api.body(case.ask), **case.raw.get(api.name, {})}
    outcome = api.send(served, body, mode == "streamed", headers={"x-request-id": "mine-1"})
    assert outcome.status == 200, outcome
    check_sent(case, api, served)
    check_choices(case, api, served, script, outcome)
    check_counts(case, served, outcome, before, group)


def _script(case: Case, served: Served, group: int) -> Script:
    if not isinstance(case.says, str):
        return Script(case.says, group, timing=case.timing)
    script = served.script(case.says, ends=not case.hangs, group=group, is_hanging=case.hangs, timing=case.timing)
    if case.service == "sentence":  # words begin with such a vocabulary's mark for a space
        ids = served.ids("hello world" + case.says)[len(served.ids("hello world")) :]
        assert served.tokenizer.pieces(ids)[0].startswith("▁")
        return replace(script, token_ids=[*ids, *script.token_ids[-1:]])
    return script


def check_sent(case: Case, api: Api, served: Served) -> None:
    """Check what reached the engine."""
    first = served.engine.sent[0]
    assert {name: first[name] for name in case.sent} == case.sent
    if case.grammar is not None:
        ((kind, _),) = case.ask["form"].items() if "form" in case.ask else [("json", "")]
        param = api.param(f"form.{kind}")
        assert [first["grammar"][name] for name in ("kind", "text", "param")] == [*case.grammar, param]
    if case.prompt is not None:
        assert list(first["prompt_ids"]) == served.ids(case.prompt)
    seeds = [one["seed"] for one in served.engine.sent]
    if "seed" in case.ask:
        assert seeds == [(case.ask["seed"] + rank) % 2**64 for rank in range(len(seeds))]
    assert len(set(seeds)) == len(seeds)
    assert all(one["request_id"].startswith("mine-1.") for one in served.engine.sent)
    assert len({one["request_id"] for one in served.engine.sent}) == len(seeds)
    assert served.engine.admitted == [len(seeds)] and not served.engine.num_inside


def check_choices(case: Case, api: Api, served: Served, script: Script, outcome: Outcome) -> None:
    """Check the choices that came back."""
    assert outcome.texts == ([case.text] if isinstance(case.text, str) else list(case.text))
    reason = case.named.get(api.name, case.reason)
    choices = [outcome.choices[index] for index in range(len(outcome.choices))]
    assert [one.reason for one in choices] == ([reason] * len(choices) if isinstance(reason, str) else list(reason))
    assert [call for one in choices for call in one.called] == list(case.calls)
    ids = [call.id for one in choices for call in one.calls.values()]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"call_[a-zA-Z0-9]{24}", call_id) for call_id in ids)
    wanted = [one.logprob for one in likely(script.token_ids, case.ask.get("logprobs"))]
    assert all(one.logprobs == wanted for one in choices)
    assert all(one.timing == (TOLD_TIMING if case.ask.get("include_timing") else None) for one in choices)
    assert api.name in NO_STOPS or choices[0].stop == case.stop
    assert all(one.reasoning == case.reasoning for one in choices)
    if "return_token_ids" in case.ask or not api.can_be_whole:
        assert outcome.usage is not None and sum(len(one.token_ids) for one in choices) == outcome.usage[1]
        assert case.each or all(one.token_ids == list(script.token_ids)[: len(one.token_ids)] for one in choices)
    endings = {served.engine.wait_ending() for _ in choices}
    assert endings == {"closed"} if case.hangs else case.stop or endings == {"complete"}


def check_counts(case: Case, served: Served, outcome: Outcome, before: Mapping[str, float], group: int) -> None:
    """Check the token counts that client and operator get, and the measurements of tokens."""
    assert outcome.headers["x-request-id"] == "mine-1" and outcome.usage is not None
    num_prompt, num_tokens = len(served.engine.sent[0]["prompt_ids"]), outcome.usage[1]
    assert outcome.usage == (num_prompt, num_tokens, min(served.engine.script.timing.cached_tokens, num_prompt))
    num_cut = served.engine.num_given - num_tokens  # that came with the last token of a stop string
    choices = list(outcome.choices.values())
    assert 0 <= num_cut < (group if case.stop else 1)
    num_first = len(choices) * min(group, num_tokens // len(choices))  # tokens that arrive together
    expected = {
        "prompt_tokens_total": num_prompt,
        "generation_tokens_total": num_tokens,
        "time_to_first_token_seconds_count": len(choices),
        "e2e_request_latency_seconds_count": len(choices),
        "inter_token_latency_seconds_count": None if case.each else num_tokens - num_first,
        "length": sum(one.reason == "length" for one in choices),
        "stop": sum(one.reason != "length" for one in choices),
    }
    moved = {name: count - before[name] for name, count in measured(served).items()}
    assert moved == {name: moved[name] if count is None else count for name, count in expected.items()}


def measured(served: Served) -> dict[str, float]:
    """The counters of requests."""
    latencies = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    names = [*(f"{name}_seconds_count" for name in latencies), "prompt_tokens_total", "generation_tokens_total"]
    counts = {name: served.count(name) for name in names}
    return counts | {why: served.count("request_success_total", finished_reason=why) for why in ("stop", "length")}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(("choice", "allowed"), [("required", ["weather", "now"]), ("now", ["now"])])
def test_a_forced_call_has_a_grammar(served: Served, name: str, choice: str, allowed: list[str]) -> None:
    served.engine.reset(served.script(NOW))
    outcome = APIS[name].ask(served, {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False})
    assert outcome.choices[0].called == [("now", {})]
    (sent,) = served.engine.sent
    assert (sent["grammar"]["kind"], sent["grammar"]["param"]) == ("structural_tag", "tools")
    assert [name for name in ("weather", "now") if f'\\"{name}\\"' in sent["grammar"]["text"]] == allowed


@pytest.mark.parametrize("name", ["chat", "responses", "Chat"])
def test_a_form_binds_answers_that_do_not_call(served: Served, name: str) -> None:
    APIS[name].ask(served, {"tools": TOOLS, "form": {"json_object": True}})
    assert json.loads(served.engine.sent[0]["grammar"]["text"])["format"]["type"] == "or"


@pytest.mark.parametrize("name", CHATS)
def test_a_budget_of_reasoning_is_in_the_grammar_of_any_answer(thinking: Served, served: Served, name: str) -> None:
    budget: dict[str, Any] = {"max_reasoning_tokens": 3}
    if name == "messages":
        budget = {"thinking": {"type": "enabled", "budget_tokens": 3}}
    api = APIS[name]
    for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}):
        thinking.engine.reset(thinking.script("<think>\nGreet.\n</think>\n\n" + (CALL if more else "hello")))
        outcome = api.send(thinking, {**api.body({**more, "max_tokens": 150}), **budget})
        assert outcome.choices[0].reasoning == "Greet."
        assert outcome.choices[0].called == ([WEATHER] if more else [])
        assert '"max_tokens":3}' in thinking.engine.sent[0]["grammar"]["text"]
    api.send(thinking, {**api.body({"max_tokens": 3}), **budget})  # the answer is over before
    assert thinking.engine.sent[-1]["grammar"] is None
    if name != "messages":  # which refuses thinking that is enabled
        outcome = api.send(served, {**api.body({}), **budget})
        assert "max_reasoning_tokens has no effect on this model" in outcome.headers["x-baton-warning"]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("mode", [False, True])
def test_a_call_cut_off_by_the_limit(served: Served, name: str, mode: bool) -> None:
    """Optional, it becomes content; forced, it has the arguments so far, or none in Messages, which needs JSON."""
    served.engine.reset(served.script(CALL))
    limit = {"tools": TOOLS, "max_tokens": len(served.ids(CALL)) - 30}
    free = APIS[name].ask(served, limit, mode).choices[0]
    assert (free.reason, free.calls) == ("length", {}) and free.text and CALL.startswith(free.text)
    forced = APIS[name].ask(served, {**limit, "tool_choice": "required"}, mode).choices[0]
    (call,) = forced.calls.values()
    assert (forced.reason, forced.text, call.name) == ("length", "", "weather")
    assert ('{"city": "Köln 🙂"}' if mode or name != "messages" else "{}").startswith(call.arguments)
