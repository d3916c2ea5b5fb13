"""Choices of tools, as each API writes them and as the rules take them."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.api.anthropic.types import MessagesRequest
from gateway.api.grpc.requests import chat_request
from gateway.api.openai.types import ChatCompletionRequest
from gateway.api.responses.types import ResponsesRequest
from gateway.errors import ApiError
from gateway.request.rules import check_budget
from gateway.request.types import GenerateRequest
from gateway.tools.request import AllowedChoice, RawTools, Tool, check_tools
from protos import inference_pb2 as pb
from wire.dialects import FORMATS, PLAIN

HERMES, UNKNOWN = FORMATS["hermes"], PLAIN
TOOLS = (Tool("a", param="tools[0]"), Tool("b", param="tools[1]"), Tool("c", param="tools[2]"))
SAID: list[Any] = [{"role": "user", "content": "Hi"}]


def chat(mode: str) -> GenerateRequest:
    functions = [{"type": "function", "function": {"name": name}} for name in "abc"]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions[:2]}}
    body = {"model": "m", "messages": SAID, "tools": functions, "tool_choice": choice, "max_reasoning_tokens": 7}
    return ChatCompletionRequest.model_validate(body).raw()


def responses(mode: str) -> GenerateRequest:
    functions = [{"type": "function", "name": name} for name in "abc"]
    choice = {"type": "allowed_tools", "mode": mode, "tools": functions[:2]}
    body = {"model": "m", "input": "Hi", "tools": functions, "tool_choice": choice, "max_reasoning_tokens": 7}
    return ResponsesRequest.model_validate(body).raw()


def grpc(mode: str) -> GenerateRequest:
    tools = [pb.Tool(name=name) for name in "abc"]
    said = [pb.ChatMessage(role="user", content="Hi")]
    choice = "" if mode == "auto" else mode
    given = pb.ChatRequest(
        messages=said, tools=tools, tool_choice=choice, allowed_tools=["a", "b"], max_reasoning_tokens=7
    )
    return chat_request(given)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("api", [chat, responses, grpc])
def test_allowed_tools_and_a_budget_in_each_api(api: Any, mode: str) -> None:
    raw = api(mode)
    assert raw.max_reasoning_tokens == 7
    assert isinstance(raw.tools.choice, AllowedChoice)
    use = check_tools(raw.tools, HERMES)
    assert use is not None
    assert use.is_required == (mode == "required")
    assert use.named is None
    assert [tool.name for tool in use.callable_tools] == ["a", "b"]
    assert len(use.tools) == 3  # the prompt shows all


def test_thinking_has_a_budget_and_grpc_strict_tools() -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    body = {"model": "m", "messages": SAID, "max_tokens": 9, "thinking": thinking}
    raw = MessagesRequest.model_validate(body).raw()
    assert check_budget(raw) == 5
    assert check_budget(replace(raw, max_tokens=5)) is None  # the answer ends first
    with pytest.raises(ApiError) as caught:
        check_budget(replace(raw, max_reasoning_tokens=-1))
    assert caught.value.param == "thinking.budget_tokens"
    said = [pb.ChatMessage(role="user", content="Hi")]
    request = chat_request(pb.ChatRequest(messages=said, tools=[pb.Tool(name="a", strict=True)]))
    assert request.tools.tools[0].is_strict


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (AllowedChoice(["a", "x"], "auto", "p"), "p"),
        (AllowedChoice([], "auto", "p"), "p"),
        (AllowedChoice(["a"], "required", "p"), "tool_choice"),  # without tools
    ],
)
def test_allowed_tools_are_among_the_tools(choice: AllowedChoice, param: str) -> None:
    tools = () if param == "tool_choice" else TOOLS
    with pytest.raises(ApiError) as caught:
        check_tools(RawTools(tools, choice), HERMES)
    assert caught.value.param == param


def test_grpc_takes_allowed_tools_with_two_choices_only() -> None:
    for choice in ("none", "a"):
        with pytest.raises(ApiError, match="auto or required"):
            chat_request(pb.ChatRequest(tool_choice=choice, allowed_tools=["a"]))


def test_what_a_format_without_grammar_cannot_enforce() -> None:
    allowed = AllowedChoice(["a"], "auto", "p")
    for choice in (None, "auto", allowed):
        use = check_tools(RawTools(TOOLS, choice), UNKNOWN)
        assert use is not None
        assert [warning.partition(":")[0] for warning in use.warnings] == ["calls are not read"]
    use = check_tools(RawTools(TOOLS, is_parallel=False), UNKNOWN)
    assert use is not None
    assert "parallel_tool_calls has no effect" in use.warnings[1]
    assert check_tools(RawTools(TOOLS, "none"), UNKNOWN) is None
    strict = (TOOLS[0], replace(TOOLS[1], is_strict=True))
    for raw, param in (
        (RawTools(TOOLS, "required"), "tool_choice"),
        (RawTools(TOOLS, replace(allowed, mode="required")), "tool_choice"),
        (RawTools(strict), "tools[1]"),
    ):
        with pytest.raises(ApiError, match=r"in a way not known here.*--tool-format") as caught:
            check_tools(raw, UNKNOWN)
        assert caught.value.param == param
