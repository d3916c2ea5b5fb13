"""Models that write calls and thoughts in their own words, as clients of each API see them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway.api.access import WARNING_HEADER
from gateway.request.prepare import ApiOptions
from tests.support.adapters import APIS
from tests.support.api_server import SERVED, WAIT_S, Served, run_api
from tests.support.chat_templates import REBUILT
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, write_family
from tests.support.words import HELLO, TOOLS

CHATS = ("chat", "responses", "messages", "Chat")
HARMONY = ("<|channel|>", "<|message|>", "<|constrain|>", "<|return|>", "<|call|>")
THOUGHT = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln 🙂"}'
CITY = 'two\nlines, "quotes" and </parameter> 🙂'
XML = f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n</function>\n</tool_call>"


@contextmanager
def run_family(folder: Path, name: str, markers: Sequence[str] = (), end: str = "<|end|>") -> Iterator[Served]:
    write = partial(write_family, template=REBUILT.get(name, CHAT_TEMPLATE), markers=markers, end=end)
    with run_api(folder, ApiOptions(), write) as served:
        yield served


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_family(tmp_path_factory.mktemp("harmony"), "harmony", HARMONY, "<|return|>") as served:
        yield served


@pytest.fixture(scope="module")
def xml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_family(tmp_path_factory.mktemp("xml"), "qwen-xml") as served:
        yield served


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_family(tmp_path_factory.mktemp("unknown"), "") as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(
    ("says", "reasoning", "text", "calls"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Yes.<|return|>", "Hm, <b>.", "Yes.", []),
        (f"{THOUGHT}{PREAMBLE}{CALL}<|call|>", "Hm, <b>.", "I look.", [("weather", {"city": "Köln 🙂"})]),
        (CALL, "", "", [("weather", {"city": "Köln 🙂"})]),
    ],
)
def test_channels(
    harmony: Served, name: str, stream: bool, says: str, reasoning: str, text: str, calls: Sequence[Any]
) -> None:
    harmony.engine.reset(harmony.script(says))
    (choice,) = APIS[name].ask(harmony, {"tools": TOOLS}, stream).choices.values()
    assert (choice.reasoning, choice.text, choice.called) == (reasoning, text, calls)
    assert choice.reason == ("tool_calls" if calls else "stop")
    ends = {harmony.tokenizer.encode(end, add_special_tokens=False)[0] for end in ("<|call|>", "<|return|>")}
    assert ends <= set(harmony.engine.sent[0]["stop_token_ids"])


def test_thoughts_between_calls_go_back(harmony: Served) -> None:
    harmony.engine.reset(harmony.script("<|channel|>final<|message|>Yes."))
    call = {"id": "x", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    said = [
        *HELLO,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "noon"},
    ]
    outcome = APIS["chat"].send(harmony, {**APIS["chat"].body({}), "messages": said})
    assert outcome.texts == ["Yes."]
    prompt = harmony.tokenizer.decode(harmony.engine.sent[0]["prompt_ids"], with_control_tokens=True)
    assert "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now<|channel|>commentary" in prompt


def test_markers_around_an_answer_are_not_text(tmp_path: Path) -> None:
    template = REBUILT["cohere"] + "{# <|START_THINKING|><|END_THINKING|> #}"
    tokens = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    with run_api(tmp_path, ApiOptions(), partial(write_family, template=template, tokens=tokens)) as served:
        served.engine.reset(served.script("{}Hm.{}{}Yes.{}".format(*tokens)))
        (choice,) = APIS["chat"].ask(served, {}).choices.values()
        assert (choice.reasoning, choice.text) == ("Hm.", "Yes.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CHATS)
def test_values_in_xml(xml: Served, name: str, stream: bool) -> None:
    xml.engine.reset(xml.script(f"I look.\n{XML}\n{XML}"))
    (choice,) = APIS[name].ask(xml, {"tools": TOOLS}, stream).choices.values()
    assert (choice.text, choice.called) == ("I look.", [("weather", {"city": CITY})] * 2)


@pytest.mark.parametrize("name", CHATS)
def test_a_template_with_calls_of_its_own_kind(unknown: Served, name: str) -> None:
    unknown.engine.reset(unknown.script("call weather, Köln"))
    outcome = APIS[name].ask(unknown, {"tools": TOOLS})
    assert outcome.texts == ["call weather, Köln"] and outcome.choices[0].reason == "stop"
    assert "calls are not read" in outcome.headers[WARNING_HEADER]
    assert '"name": "weather"' in unknown.tokenizer.decode(unknown.engine.sent[0]["prompt_ids"])
    for choice in ("required", "weather"):
        refused = APIS[name].ask(unknown, {"tools": TOOLS, "tool_choice": choice})
        assert "--tool-format" in refused.message and refused.status == 400
    assert WARNING_HEADER not in APIS[name].ask(unknown, {"tools": TOOLS, "tool_choice": "none"}).headers


def test_models_say_how_they_write(harmony: Served, unknown: Served) -> None:
    (card,) = harmony.http.get("/v1/models").json()["data"]
    assert (card["tool_format"], card["reasoning_format"]) == ("harmony", "harmony")
    assert card["tool_format_reason"] == "the chat template writes calls so"
    (card,) = unknown.http.get("/v1/models").json()["data"]
    assert (card["tool_format"], card["reasoning_format"]) == ("plain", None)


@pytest.mark.parametrize("name", ["final", "call"])
def test_messages_have_phases(harmony: Served, name: str) -> None:
    ends: Mapping[str, tuple[str, list[Any]]] = {
        "final": ("<|channel|>final<|message|>Yes.<|return|>", [("message", "final_answer", "Yes.")]),
        "call": (f"{CALL}<|call|>", [("function_call", None, None)]),
    }
    end, items = ends[name]
    expected = [("reasoning", None, "Hm, <b>."), ("message", "commentary", "I look."), *items]
    tools = [{"type": "function", **tool} for tool in TOOLS]
    body = {"model": SERVED, "input": "hello", "tools": tools}
    harmony.engine.reset(harmony.script(f"{THOUGHT}{PREAMBLE}{end}"))
    output = harmony.http.post("/v1/responses", json=body).json()["output"]
    assert [(one["type"], one.get("phase"), one.get("content", [{}])[0].get("text")) for one in output] == expected
    harmony.engine.reset(harmony.script(f"{THOUGHT}{PREAMBLE}{end}"))
    lines = harmony.http.post("/v1/responses", json={**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(one["type"], one.get("phase")) for one in begun] == [one[:2] for one in expected]
    harmony.engine.reset(harmony.script("<|channel|>final<|message|>Yes."))
    said = [{"role": "user", "content": "a"}, *output]
    said += [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "b"}
        for one in output[2:]
        if "call_id" in one
    ]
    again = harmony.http.post("/v1/responses", json={**body, "input": [*said, {"role": "user", "content": "c"}]})
    assert again.status_code == 200, again.text
    prompt = harmony.tokenizer.decode(harmony.engine.sent[0]["prompt_ids"], with_control_tokens=True)
    assert "I look." in prompt


LONG = f"{CITY}\n" + "one < two 🙂, " * 200  # its arguments are streamed
ARGUMENTS = json.dumps({"city": LONG}, ensure_ascii=False)
WRITTEN = {  # two calls at once, where the dialect has several
    "harmony": f"{CALL.partition('{')[0]}{ARGUMENTS}<|call|>",
    "qwen-xml": f"{XML.replace(CITY, LONG)}\n{XML}",
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps({"city": CITY})}}}\n</tool_call>',
}


def by_chat(client: openai.OpenAI) -> tuple[list[str], list[Any], int]:
    tools: Any = [{"type": "function", "function": tool} for tool in TOOLS]
    with client.chat.completions.stream(model=SERVED, messages=[{"role": "user", "content": "hi"}], tools=tools) as it:
        parts = [event.arguments_delta for event in it if event.type == "tool_calls.function.arguments.delta"]
        calls: Any = it.get_final_completion().choices[0].message.tool_calls
    return [call.function.name for call in calls], [json.loads(call.function.arguments) for call in calls], len(parts)


def by_responses(client: openai.OpenAI) -> tuple[list[str], list[Any], int]:
    tools: Any = [{"type": "function", **tool} for tool in TOOLS]
    with client.responses.stream(model=SERVED, input="hi", tools=tools) as it:
        parts = [event.delta for event in it if event.type == "response.function_call_arguments.delta"]
        calls: Any = [item for item in it.get_final_response().output if item.type == "function_call"]
    return [call.name for call in calls], [json.loads(call.arguments) for call in calls], len(parts)


def by_messages(client: anthropic.Anthropic) -> tuple[list[str], list[Any], int]:
    tools: Any = [{"name": tool["name"], "input_schema": tool.get("parameters", {"type": "object"})} for tool in TOOLS]
    asked: Any = {"model": SERVED, "max_tokens": 9000, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    with client.messages.stream(**asked) as it:
        parts = [event for event in it if event.type == "input_json"]
        calls: Any = [block for block in it.get_final_message().content if block.type == "tool_use"]
    return [call.name for call in calls], [call.input for call in calls], len(parts)


@pytest.mark.parametrize("dialect", WRITTEN)
def test_official_clients_read_streams_of_each_dialect(tmp_path: Path, dialect: str) -> None:
    """Token by token, so that emoji are cut."""
    write = partial(
        write_family,
        template=REBUILT.get(dialect, CHAT_TEMPLATE),
        markers=HARMONY if dialect == "harmony" else (),
        end="<|return|>" if dialect == "harmony" else "<|end|>",
        context=1 << 14,
    )
    with run_api(tmp_path, ApiOptions(tool_format=dialect), write) as served:
        openai_client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        others = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=WAIT_S)
        expected = [{"city": LONG}, {"city": CITY}][: 1 if dialect == "harmony" else 2]
        for ask in (
            partial(by_chat, openai_client),
            partial(by_responses, openai_client),
            partial(by_messages, others),
        ):
            served.engine.reset(served.script(WRITTEN[dialect]))
            names, arguments, num_parts = ask()
            assert (names, arguments) == (["weather"] * len(expected), expected)
            assert num_parts > len(expected) + 10
