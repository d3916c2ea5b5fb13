"""Conversations as coding agents send them, shortened and in our words: each turn's prompt goes on from the last."""

import json
from typing import Any

import pytest

from gateway.api.access import WARNING_HEADER
from tests.support.adapters import APIS
from tests.support.api_server import SERVED, Served
from tests.support.words import CALL

HEADER = "x-anthropic-billing-header: cc_version=2.1.0.{}; cc_entrypoint=cli; cch={};"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def claude_code(turn: int) -> dict[str, Any]:
    """The first or second request of a session: the second has the first's call and its result."""
    said = [
        {"role": "user", "content": [text("<reminder>It is Monday.</reminder>"), text("go", **EPHEMERAL)]},
        {"role": "system", "content": "Helpers: none."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "sun", "is_error": False, **EPHEMERAL}]},
    ]  # fmt: skip
    return {
        "model": SERVED,
        "messages": said[: 2 * turn],
        "system": [text(HEADER.format(turn, turn * 77)), text("You help.", **EPHEMERAL), text("\nBe brief.")],
        "tools": [
            {"name": "weather", "description": "Get it.", "input_schema": {"$schema": "x", "type": "object"}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": json.dumps({"session_id": str(turn)})},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }  # fmt: skip


def codex(turn: int) -> dict[str, Any]:
    """The same of another agent."""
    said = [
        {"type": "message", "id": "m1", "role": "developer", "content": [{"type": "input_text", "text": "You code."}]},
        {"type": "message", "id": "m2", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "function_call", "status": "completed", "id": "fc_1", "name": "wait", "namespace": "crew",
         "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "done"},
    ]  # fmt: skip
    parameters = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    wait = {"type": "function", "name": "wait", "description": "Wait.", "strict": False, "parameters": parameters}
    return {
        "model": SERVED,
        "stream": True,
        "input": said[: 2 * turn],
        "tools": [
            {**wait, "name": "weather"},
            {"type": "namespace", "name": "crew", "description": "Helpers.", "tools": [wait]},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"turn_id": str(turn)},
    }


TOLD = {
    "messages": (
        "tools[1] of the type 'web_search_20250305' is left out: no tools run here; "
        "context_management.edits[0] clears nothing and has no effect here; "
        "x-anthropic-billing-header is left out of the prompt; thinking has no effect on this model; "
        "output_config.effort has no effect on this model; "
        "max_tokens is lowered to {rest}, the rest of the context"
    ),
    "responses": (
        "client_metadata has no effect here; "
        "tools[1] is flattened: its functions are crew__NAME; "
        "tools[2] of the type 'web_search' is left out: no tools run here"
    ),
}
BEGINS = {"messages": "<|system|>You help.\nBe brief.<|end|>", "responses": "<|system|>You code.<|end|>"}


@pytest.mark.parametrize(("name", "body"), [("messages", claude_code), ("responses", codex)])
def test_a_session(served: Served, name: str, body: Any) -> None:
    served.engine.reset(served.script(CALL, group=100))
    for turn in (1, 2):
        outcome = APIS[name].send(served, body(turn), True)
        rest = 512 - len(served.engine.sent[-1]["prompt_ids"])
        assert (outcome.status, outcome.headers[WARNING_HEADER]) == (200, TOLD[name].format(rest=rest))
        assert outcome.choices[0].called[0][0] == "weather"
    first, second = (
        served.tokenizer.decode(sent["prompt_ids"], with_control_tokens=True) for sent in served.engine.sent
    )
    assert BEGINS[name] in first and "billing" not in first and "web_search" not in first
    assert second.startswith(first)
    assert served.engine.sent[0]["grammar"] is None


@pytest.mark.parametrize("system", [f"{HEADER}\nb", "b", [text("b")], [text(HEADER), text("b")]])
def test_only_the_line_of_the_header_is_left_out(served: Served, system: Any) -> None:
    asked = {**APIS["messages"].body({}), "system": system}
    APIS["messages"].send(served, asked)
    del asked["max_tokens"]
    count = served.http.post("/v1/messages/count_tokens", json=asked)
    ids = served.ids("<|system|>b<|end|><|user|>hello<|end|><|assistant|>")
    assert list(served.engine.sent[0]["prompt_ids"]) == ids and count.json() == {"input_tokens": len(ids)}
