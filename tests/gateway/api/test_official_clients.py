"""The official clients of OpenAI and Anthropic: answers, streams, calls sent back with their results, errors."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from gateway.errors import ApiError, overloaded
from tests.support.adapters import APIS
from tests.support.api_server import ANSWER, KEYS, SERVED, WAIT_S, Served
from tests.support.fake_ring import Script
from tests.support.words import CALL, HELLO, NOW, TOOLS

CHAT: Any = {"model": SERVED, "messages": HELLO}
RESPONSES: Any = {"model": SERVED, "input": "hello"}
MESSAGES: Any = {"model": SERVED, "messages": HELLO, "max_tokens": 200}
BOTH = f"Let me look. {CALL}\n{NOW}"
CALLED = [("weather", {"city": "Köln 🙂"}), ("now", {})]
ANYTHING = pytest.mark.parametrize("name", ["chat", "responses", "messages"])
OPTIONS: Any = {"max_retries": 0, "timeout": WAIT_S}


class City(pydantic.BaseModel):
    name: str


@pytest.fixture
def openai_client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS[0], **OPTIONS)


@pytest.fixture
def anthropic_client(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=KEYS[0], auth_token=None, **OPTIONS)


@pytest.fixture
def ask(name: str, openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> Callable[..., Any]:
    """Asks an API: fields of a request |-> the client's answer."""
    create, body = {
        "chat": (openai_client.chat.completions.create, CHAT),
        "responses": (openai_client.responses.create, RESPONSES),
        "messages": (anthropic_client.messages.create, MESSAGES),
    }[name]
    called: Any = create
    return lambda **fields: called(**{**body, **fields})


def tools_of(name: str) -> Any:
    return APIS[name].body({"tools": TOOLS})["tools"]


def test_answers_and_models(openai_client: openai.OpenAI) -> None:
    client = openai_client
    more: Any = {"logprobs": True, "top_logprobs": 1}
    answer = client.chat.completions.create(**CHAT, **more)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    chunks = list(client.chat.completions.create(**CHAT, **more, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert chunks[-1].usage == answer.usage and not chunks[-1].choices
    assert client.completions.create(model=SERVED, prompt="hello", max_tokens=3).choices[0].finish_reason == "length"
    assert [model.id for model in client.models.list()] == [client.models.retrieve(SERVED).id] == [SERVED]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_on_an_event_loop(served: Served) -> None:
    async def talk() -> list[str]:
        async with (
            openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEYS[0], **OPTIONS) as one,
            anthropic.AsyncAnthropic(base_url=served.url, api_key=KEYS[0], **OPTIONS) as other,
            other.messages.stream(**MESSAGES) as messages,
        ):
            texts = await one.completions.create(model=SERVED, prompt="hi", stream=True)
            events: Any = await one.responses.create(**RESPONSES, stream=True)
            return [
                "".join([chunk.choices[0].text async for chunk in texts]),
                "".join([event.delta async for event in events if event.type == "response.output_text.delta"]),
                "".join([text async for text in messages.text_stream]),
            ]

    assert asyncio.run(talk()) == [ANSWER] * 3


def test_calls_and_forms_in_responses(openai_client: openai.OpenAI, served: Served) -> None:
    client, asked = openai_client, {**RESPONSES, "tools": tools_of("responses")}
    served.ring.reset(served.script(BOTH))
    with client.responses.stream(**asked) as stream:
        streamed: Any = stream.get_final_response()
    whole: Any = client.responses.create(**asked)
    for answer in (streamed, whole):
        assert answer.output[0].content[0].text == answer.output_text == "Let me look."
        assert [(one.name, json.loads(one.arguments)) for one in answer.output[1:]] == CALLED
    results = [{"type": "function_call_output", "call_id": one.call_id, "output": "?"} for one in whole.output[1:]]
    items: Any = [*whole.output, *results]
    client.responses.create(model=SERVED, input=items)
    served.ring.reset(served.script('{"name": "Ulm"}'))
    assert client.responses.parse(**RESPONSES, text_format=City).output_parsed == City(name="Ulm")
    with client.responses.stream(**RESPONSES, text_format=City) as parsing:
        assert parsing.get_final_response().output_parsed == City(name="Ulm")
    assert [sent["grammar"]["kind"] for sent in served.ring.sent] == ["json_schema"] * 2


def test_calls_and_forms_in_messages(anthropic_client: anthropic.Anthropic, served: Served) -> None:
    client, asked = anthropic_client, {**MESSAGES, "tools": tools_of("messages")}
    served.ring.reset(served.script(BOTH))
    with client.messages.stream(**asked) as stream:
        streamed: Any = stream.get_final_message()
    whole = client.messages.create(**asked)
    for message in (streamed, whole):
        text, *uses = message.content
        assert (text.type, text.text, message.stop_reason) == ("text", "Let me look.", "tool_use")
        assert [(use.name, use.input) for use in uses] == CALLED
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "?"} for use in whole.content[1:]]
    said: Any = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    client.messages.create(**{**MESSAGES, "messages": said})
    served.ring.reset(served.script('{"name": "Ulm"}'))
    assert client.messages.parse(**MESSAGES, output_format=City).parsed_output == City(name="Ulm")
    served.ring.reset(served.script(CALL))
    with client.messages.stream(
        **{**asked, "max_tokens": len(served.ids(CALL)) - 30}, tool_choice={"type": "any"}
    ) as cut:
        assert cut.get_final_message().stop_reason == "max_tokens"  # with half of a call's arguments


@ANYTHING
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_raise(name: str, ask: Callable[..., Any], served: Served, stream: bool) -> None:
    kinds: Any = anthropic if name == "messages" else openai
    served.ring.reset(Script(error=overloaded("the queue is full")))
    with pytest.raises(kinds.RateLimitError, match="the queue is full") as limited:
        ask(stream=stream)
    assert limited.value.response.headers["retry-after"] == "1"
    with pytest.raises(kinds.NotFoundError, match="'gpt' is not served"):
        ask(model="gpt", stream=stream)


@ANYTHING
@pytest.mark.parametrize("bug", [None, RuntimeError("secret detail")])
def test_a_fault_in_mid_stream_raises(
    name: str, ask: Callable[..., Any], served: Served, bug: Exception | None
) -> None:
    error = None if bug else ApiError(503, "no worker is left")
    served.ring.reset(Script(served.ids("hello"), error=error, bug=bug))
    kind: Any = anthropic.APIStatusError if name == "messages" else openai.APIError
    with pytest.raises(kind, match="failed inside" if bug else "no worker is left"):
        list(ask(stream=True))
