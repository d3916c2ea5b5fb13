"""OpenAI's Responses API only: its events, its items, echoed fields of the request, and its official client."""

import json
from typing import Any

import openai
import pytest

from gateway.errors import not_ready
from tests.support.adapters import APIS
from tests.support.api_server import ANSWER, KEYS, SERVED, WAIT_S, Served
from tests.support.fake_ring import Script
from tests.support.rest_adapters import read_events
from tests.support.words import CALL, NOW, TOOLS

API = APIS["responses"]
BOTH = f"Let me look. {CALL}\n{NOW}"
CALLING: Any = {"tools": API.body({"tools": TOOLS})["tools"]}
TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_ENDS = ["output_text.done", "content_part.done", "output_item.done"]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def post(served: Served, **fields: Any) -> Any:
    answer = served.http.post("/v1/responses", json={**API.body({}), **fields})
    assert answer.status_code == 200, answer.text
    events = read_events(answer.text) if fields.get("stream") else [answer.json()]
    assert [event.get("sequence_number", 0) for event in events] == list(range(len(events)))
    return events if fields.get("stream") else events[0]


def kinds(events: list[Any]) -> list[str]:
    """Types in order; equal neighbours are merged."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(found) if not at or found[at - 1] != kind]


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS[0], max_retries=0, timeout=WAIT_S)


def test_what_was_asked_comes_back(served: Served) -> None:
    asked = {
        "instructions": "be short", "temperature": 0.5, "top_p": 0.5, "max_output_tokens": 100, "metadata": {"a": "b"},
        "tools": [{"type": "function", "name": "now", "parameters": None, "strict": None}],
        "parallel_tool_calls": False,
    }  # fmt: skip
    answer = post(served, **asked)
    told = {name: answer[name] for name in asked if name != "tools"}
    assert told == {name: asked[name] for name in told}
    assert [tool["name"] for tool in answer["tools"]] == ["now"]
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert answer["id"].startswith("resp_") and item["id"].startswith("msg_")
    fixed = {
        "object": "response", "status": "completed", "model": SERVED, "error": None, "incomplete_details": None,
        "tool_choice": "auto", "text": {"format": {"type": "text"}}, "store": False, "previous_response_id": None,
        "truncation": "disabled",
    }  # fmt: skip
    assert {name: answer[name] for name in fixed} == fixed
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    assert (post(served)["parallel_tool_calls"], post(served)["tools"]) == (True, [])


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_events(served: Served, group: int) -> None:
    served.ring.reset(served.script(BOTH, group=group))
    events = post(served, stream=True, **CALLING)
    calls = [*CALL_EVENTS, *CALL_EVENTS]
    assert kinds(events) == ["created", "in_progress", *TEXT_EVENTS, *TEXT_ENDS, *calls, "completed"]
    created, completed = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert completed["id"] == created["id"]
    for index, item in enumerate(completed["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        assert mine[0]["item"]["status"] == "in_progress" and mine[-1]["item"] == item
        told = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        (done,) = [event for event in mine if event["type"].endswith(("output_text.done", "arguments.done"))]
        assert told == done.get("text", done.get("arguments"))
        if item["type"] == "message":
            assert item["content"][0]["text"] == told
        else:
            assert mine[0]["item"]["arguments"] == "" and item["arguments"] == told
            assert item["id"].startswith("fc_") and item["call_id"].startswith("call_")


def test_the_limit(served: Served) -> None:
    for tools, said in (({}, ANSWER), ({**CALLING, "tool_choice": "required"}, NOW + CALL)):
        served.ring.reset(served.script(said))
        limit = max(3, len(served.ids(said)) - 30)
        whole = post(served, max_output_tokens=limit, **tools)
        events = post(served, max_output_tokens=limit, stream=True, **tools)
        assert events[-1]["type"] == "response.incomplete"
        for answer in (whole, events[-1]["response"]):
            assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            statuses = [item["status"] for item in answer["output"]]
            assert statuses == (["completed", "incomplete"] if tools else ["incomplete"])
        done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
        assert done == statuses
    assert '{"city": "Köln 🙂"}'.startswith(whole["output"][1]["arguments"])
    served.ring.reset(served.script(""))
    assert post(served)["output"] == []


def test_input_tokens_are_counted(served: Served) -> None:
    more = {"instructions": "be short", **CALLING}
    body = {**API.body({}), **more}
    counted = served.http.post("/v1/responses/input_tokens", json=body).json()
    usage = post(served, **more)["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize("bug", [None, RuntimeError("secret detail")])
def test_a_fault_in_mid_stream(client: openai.OpenAI, served: Served, bug: Exception | None) -> None:
    served.ring.reset(Script(served.ids("hello"), error=None if bug else not_ready("no worker is left"), bug=bug))
    *_, failed, error = post(served, stream=True)
    assert (failed["type"], failed["response"]["status"], error["type"]) == ("response.failed", "failed", "error")
    assert failed["response"]["error"]["code"] == error["code"] == ("internal_error" if bug else "not_ready")
    assert failed["response"]["error"]["message"] == error["message"] == error["error"]["message"]
    (item,) = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "hello")
    with pytest.raises(openai.APIError, match="failed inside" if bug else "no worker is left"):
        list(client.responses.create(model=SERVED, input="hello", stream=True))


AGENTS_TOOLS: Any = [
    {"type": "namespace", "name": "crew", "description": "Helpers.", "tools": [{"type": "function", "name": "send"}]},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "[+-].*"}},
]


def test_calls_of_namespaces_and_custom_tools(client: openai.OpenAI, served: Served) -> None:
    calls = (("crew__send", {"to": "x"}), ("patch", {"input": "+ é"}))
    said = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls]
    served.ring.reset(served.script("".join(said)))
    asked: Any = {"model": SERVED, "input": "hello", "tools": AGENTS_TOOLS}
    with client.responses.stream(**asked) as stream:
        streamed: Any = stream.get_final_response()
    whole: Any = client.responses.create(**asked)
    for answer in (streamed, whole):
        send, patch = answer.output
        assert (send.type, send.name, send.namespace, send.arguments) == (
            "function_call",
            "send",
            "crew",
            '{"to": "x"}',
        )
        assert (patch.type, patch.name, patch.input, patch.id[:4]) == ("custom_tool_call", "patch", "+ é", "ctc_")
        assert [tool.type for tool in answer.tools] == ["namespace", "custom"]
    results = [
        {"type": "function_call_output", "call_id": send.call_id, "output": "ok"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "ok"},
    ]
    calling = [item.model_dump(exclude_none=True) for item in whole.output]
    more: Any = [{"role": "user", "content": "hello"}, *calling, *results]
    client.responses.create(model=SERVED, input=more, tools=AGENTS_TOOLS)
    first, _, second = served.ring.sent
    text = served.tokenizer.decode(second["prompt_ids"], with_control_tokens=True)
    assert text.startswith(served.tokenizer.decode(first["prompt_ids"], with_control_tokens=True))
    assert all(f"{name}{json.dumps(given, ensure_ascii=False)}" in text for name, given in calls)
    assert "The input matches this grammar:" in text
    assert (first["grammar"]["kind"], '"pattern":"[+-].*"' in first["grammar"]["text"]) == ("structural_tag", True)
