"""Tools with the demo model through the whole service."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.support.live import Live
from tests.support.surface import MODEL

PARIS = "What is the weather in Paris?"
RESULT = json.dumps({"city": "Paris", "temperature": 21, "condition": "sunny"})
CALLED = [("get_weather", {"city": "Paris"})]
SAME: Any = {"model": MODEL, "temperature": 0}


def _tool(name: str, description: str, parameter: str, kind: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": kind}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: list[Any] = [
    _tool("get_weather", "Get the current weather in a given location", "city", "string"),
    _tool("set_timer", "Set a timer in minutes.", "minutes", "integer"),
]
FUNCTIONS = [tool["function"] for tool in TOOLS]


@pytest.fixture(scope="module")
def client(demo: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, question: str, *more: Any, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}, *more]
    body = {**SAME, "messages": messages, "tools": TOOLS, "max_tokens": 200, **fields}
    return client.chat.completions.create(**body).choices[0]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_two_calls_in_a_stream(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris and Rome?"}]
    with client.chat.completions.stream(**SAME, messages=messages, tools=TOOLS, max_tokens=200) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert calls_of(choice.message) == [*CALLED, ("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize(("question", "choice"), [("Tell me a joke", "auto"), (PARIS, "none")])
def test_no_call_where_none_is_needed_or_wanted(client: openai.OpenAI, question: str, choice: str) -> None:
    answer = ask(client, question, tool_choice=choice)
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert answer.message.content


def test_a_call_its_result_and_the_same_answer_from_every_api(client: openai.OpenAI) -> None:
    choice = ask(client, PARIS)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert calls_of(choice.message) == CALLED
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": RESULT}
    choice = ask(client, PARIS, choice.message, result)
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    answer = choice.message.content
    assert "sunny" in answer and "21" in answer

    items: list[Any] = [{"role": "user", "content": PARIS}]
    tools: Any = [{"type": "function", **function, "strict": None} for function in FUNCTIONS]
    asked: Any = {**SAME, "max_output_tokens": 200, "tools": tools}
    called = client.responses.create(input=items, **asked)
    (call,) = called.output
    assert [(call.name, json.loads(call.arguments))] == CALLED
    items += [*called.output, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    assert client.responses.create(input=items, **asked).output_text == answer

    messages: list[Any] = [{"role": "user", "content": PARIS}]
    named = [("name", "name"), ("description", "description"), ("input_schema", "parameters")]
    asked = {**SAME, "max_tokens": 200, "tools": [{own: one[name] for own, name in named} for one in FUNCTIONS]}
    base_url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as other:
        message: Any = other.messages.create(messages=messages, **asked)
        (block,) = message.content
        assert ([(block.name, block.input)], message.stop_reason) == (CALLED, "tool_use")
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": RESULT}]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        with other.messages.stream(messages=messages, **asked) as stream:
            assert "".join(stream.text_stream) == answer


def test_ollamas_client_finds_the_service_by_its_variable(
    client: openai.OpenAI, demo: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", demo.url)
    other, asked = ollama.Client(), dict[str, Any](model=f"{MODEL}:latest", options={"temperature": 0}, tools=TOOLS)
    said: list[Any] = [{"role": "user", "content": PARIS}]
    called = other.chat(messages=said, **asked)
    (call,) = called.message.tool_calls or []
    assert [(call.function.name, call.function.arguments)] == CALLED
    said += [called.message, {"role": "tool", "tool_name": call.function.name, "content": RESULT}]
    parts = list(other.chat(messages=said, stream=True, **asked))
    answer = "".join(part.message.content or "" for part in parts)
    assert "sunny" in answer and "21" in answer
    for one in (called, parts[-1]):
        spent = [one.load_duration or 0, one.prompt_eval_duration or 0, one.eval_duration or 0]
        assert min(spent) > 0 and sum(spent) <= (one.total_duration or 0)
    assert other.ps().models[0].model == asked["model"]


def test_a_bad_schema_is_named_with_its_place(client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "fool"}}}}
    tool = {"type": "function", "function": {"name": "bad", "parameters": bad}}
    functions: Any = [{"type": "function", **each["function"]} for each in (*TOOLS, tool)]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": bad}}
    forced: Any = {"tool_choice": "required"}
    asked: list[tuple[str, Callable[[], Any]]] = [
        ("tools[2].function.parameters", lambda: ask(client, "Hello", tools=[*TOOLS, tool], **forced)),
        ("tools[2].parameters",
         lambda: client.responses.create(model=MODEL, input="Hello", tools=functions, **forced)),
        ("response_format.json_schema.schema", lambda: ask(client, "Hello", response_format=form)),
    ]  # fmt: skip
    for param, act in asked:
        with pytest.raises(openai.BadRequestError) as error:
            act()
        assert error.value.param == param
        assert f'{param} cannot be used: Unsupported type "fool" at #/properties/x/items' in error.value.message
