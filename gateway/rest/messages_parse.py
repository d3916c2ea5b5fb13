"""From a JSON object to a typed Messages request, or a 400 that names the field by its path.

Must not know HTTP or what the values mean.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from gateway.errors import bad_request
from gateway.rest.messages_types import (
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway.rest.openai_parse import validated
from gateway.rest.unsupported import (
    MESSAGES,
    MESSAGES_BLOCK,
    MESSAGES_TOOL,
    NOTHING,
    OUTPUT_CONFIG,
    Harmless,
    supported_fields,
)


def parse_messages(given: dict[str, Any]) -> MessagesRequest:
    """Raises ApiError."""
    return validated(MessagesRequest, _supported_parts(supported_fields(given, _names(MessagesRequest), MESSAGES, "")))


def parse_count_tokens(given: dict[str, Any]) -> CountTokensRequest:
    """Raises ApiError."""
    fields = supported_fields(given, _names(CountTokensRequest), MESSAGES, "")
    return validated(CountTokensRequest, _supported_parts(fields))


_BLOCKS: Mapping[str, type[BaseModel]] = {
    "text": TextBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}


def _supported_parts(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without parts that change nothing; what has a wrong type is left to the type check."""
    kept = dict(fields)
    kept["messages"] = _each(
        kept.get("messages"),
        "messages",
        lambda message, path: _with_blocks(_kept(message, MessageParam, NOTHING, path), path),
    )
    kept["system"] = _blocks(kept.get("system"), "system")
    kept["tools"] = _each(kept.get("tools"), "tools", _tool)
    kept["tool_choice"] = _kept(kept.get("tool_choice"), MessagesToolChoice, NOTHING, "tool_choice")
    kept["output_config"] = _kept(kept.get("output_config"), OutputConfig, OUTPUT_CONFIG, "output_config")
    return {name: value for name, value in kept.items() if name in fields}


def _each(given: object, path: str, keep: Callable[[object, str], object]) -> object:
    return [keep(item, f"{path}[{index}]") for index, item in enumerate(given)] if isinstance(given, list) else given


def _with_blocks(fields: object, path: str) -> object:
    """The object at `path`, its content without what changes nothing."""
    if isinstance(fields, dict) and "content" in fields:
        return {**fields, "content": _blocks(fields["content"], f"{path}.content")}
    return fields


def _blocks(given: object, path: str) -> object:
    return _each(given, path, _supported_block)


def _supported_block(block: object, path: str) -> object:
    if not isinstance(block, dict):
        raise bad_request(f"{path} must be an object", path, "invalid_type")
    kind = block.get("type")
    model = _BLOCKS.get(kind) if isinstance(kind, str) else None
    if model is None:
        message = f"{path}.type is {str(kind)[:40]!r}; it must be one of {', '.join(_BLOCKS)}"
        raise bad_request(message, f"{path}.type", "unsupported_field" if isinstance(kind, str) else "invalid_type")
    return _with_blocks(_kept(block, model, MESSAGES_BLOCK, path), path)


def _tool(given: object, path: str) -> object:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "custom":
        message = f"{path}.type is {kind[:40]!r}; only tools of the type custom are supported, which the client runs"
        raise bad_request(message, f"{path}.type", "unsupported_field")
    return _kept(given, MessagesTool, MESSAGES_TOOL, path)


def _kept(given: object, model: type[BaseModel], harmless: Harmless, path: str) -> object:
    return supported_fields(given, _names(model), harmless, f"{path}.") if isinstance(given, dict) else given


def _names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}
