"""Reads conversations and tools from protobuf messages. Must not know gRPC's calls or what values mean."""

from collections.abc import Mapping
from typing import Any

from gateway.errors import bad_request, check_count
from gateway.request.rules import MAX_MESSAGES
from gateway.request.types import Chat, Prompt
from gateway.tools.history import template_call
from gateway.tools.json_text import read_object
from gateway.tools.request import MAX_TOOLS_BYTES, Choice, NamedChoice, RawTools, Tool
from gateway.tools.template_options import Option, check_options
from protos import inference_pb2

_ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_prompt(request: "inference_pb2.ChatRequest | inference_pb2.TokenizeRequest") -> Prompt:
    """Raises ApiError."""
    messages = request.messages
    check_count("messages", len(messages), MAX_MESSAGES, "messages")
    plain = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    results = [f"messages[{index}].tool_call_id" for index, message in enumerate(messages) if message.role == "tool"]
    if isinstance(request, inference_pb2.TokenizeRequest):
        return Prompt(Chat(plain, results), "messages")
    options = _options(request.chat_template_kwargs, "chat_template_kwargs")
    return Prompt(Chat(plain, results, options=options, is_open=request.continue_final_message), "messages")


def _options(given: str, param: str) -> Mapping[str, Option]:
    """Raises ApiError."""
    try:
        return check_options(read_object(given) if given else {}, param)
    except ValueError as error:
        raise bad_request(f"{param}: {error}", param) from error


def raw_tools(request: "inference_pb2.ChatRequest | inference_pb2.TokenizeRequest") -> RawTools:
    """Raises ApiError if the parameters of a tool are not a JSON object."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if isinstance(request, inference_pb2.TokenizeRequest):
        return RawTools(tools)
    is_parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    return RawTools(tools, choice=_choice(request.tool_choice), is_parallel=is_parallel)


def _choice(given: str) -> Choice | NamedChoice | None:
    words: dict[str, Choice | None] = {"": None, "none": "none", "auto": "auto", "required": "required"}
    return words[given] if given in words else NamedChoice(given, "tool_choice")


def _message(given: inference_pb2.ChatMessage, path: str) -> Mapping[str, Any]:
    """As chat templates take it."""
    if given.role not in _ROLES:
        raise bad_request(f"{path}.role is {given.role[:40]!r}; it must be one of {', '.join(_ROLES)}", f"{path}.role")
    calls = [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(given.tool_calls)]
    optional = {
        "name": given.name,
        "tool_call_id": given.tool_call_id,
        "tool_calls": calls,
        "reasoning_content": given.reasoning,
    }
    return {"role": given.role, "content": given.content} | {name: value for name, value in optional.items() if value}


def _call(given: inference_pb2.ToolCall, path: str) -> dict[str, Any]:
    for field in ("id", "name"):
        if not getattr(given, field):
            raise bad_request(f"{path}.{field} is empty", f"{path}.{field}", "missing_field")
    try:
        return template_call(given.id, given.name, given.arguments)
    except ValueError as error:
        raise bad_request(f"{path}.arguments: {error}", f"{path}.arguments") from error


def _tool(given: inference_pb2.Tool, path: str) -> Tool:
    if len(given.parameters) > MAX_TOOLS_BYTES:
        raise bad_request(
            f"{path}.parameters has more than the {MAX_TOOLS_BYTES} bytes that all tools may have", f"{path}.parameters"
        )
    try:
        parameters = read_object(given.parameters) if given.parameters else None
    except ValueError as error:
        raise bad_request(f"{path}.parameters: {error}", f"{path}.parameters") from error
    return Tool(given.name, given.description or None, parameters, False, path, f"{path}.parameters")
