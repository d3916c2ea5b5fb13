"""The official clients of OpenAI and Anthropic: answers, streams, parsed forms, errors.

Calls sent back with their results: services/demo/test_tools_service.py.
"""

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from gateway.errors import ApiError
from tests.support.adapters import APIS
from tests.support.api_server import KEYS, SERVED, WAIT_S, Served
from tests.support.fake_engine_client import Script
from tests.support.words import CALL, HELLO, TOOLS

CHAT: Any = {"model": SERVED, "messages": HELLO}
RESPONSES: Any = {"model": SERVED, "input": "hello"}
MESSAGES: Any = {"model": SERVED, "messages": HELLO, "max_tokens": 200}
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


def test_forms_are_parsed(openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic, served: Served) -> None:
    served.engine.reset(served.script('{"name": "Ulm"}'))
    assert openai_client.responses.parse(**RESPONSES, text_format=City).output_parsed == City(name="Ulm")
    with openai_client.responses.stream(**RESPONSES, text_format=City) as parsing:
        assert parsing.get_final_response().output_parsed == City(name="Ulm")
    assert anthropic_client.messages.parse(**MESSAGES, output_format=City).parsed_output == City(name="Ulm")
    assert [sent["grammar"]["kind"] for sent in served.engine.sent] == ["json_schema"] * 3


def test_half_of_a_calls_arguments_can_be_read(anthropic_client: anthropic.Anthropic, served: Served) -> None:
    served.engine.reset(served.script(CALL))
    limit = len(served.ids(CALL)) - 30
    asked: Any = {**MESSAGES, "tools": APIS["messages"].body({"tools": TOOLS})["tools"], "max_tokens": limit}
    with anthropic_client.messages.stream(**asked, tool_choice={"type": "any"}) as cut:
        assert cut.get_final_message().stop_reason == "max_tokens"


@ANYTHING
@pytest.mark.parametrize("bug", [None, RuntimeError("secret detail")])
def test_a_fault_in_mid_stream_raises(
    name: str, ask: Callable[..., Any], served: Served, bug: Exception | None
) -> None:
    error = None if bug else ApiError(503, "no worker is left")
    served.engine.reset(Script(served.ids("hello"), error=error, bug=bug))
    kind: Any = anthropic.APIStatusError if name == "messages" else openai.APIError
    with pytest.raises(kind, match="failed inside" if bug else "no worker is left"):
        list(ask(stream=True))
