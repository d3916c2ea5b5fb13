"""From a JSON object to a typed Messages request, or a 400 that names the field by its path.

Must not know HTTP or what the values mean.
"""

from collections.abc import Mapping
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
from gateway.rest.openai_parse import each, kept, validated
from gateway.rest.unsupported import (
    MESSAGES,
    MESSAGES_BLOCK,
    MESSAGES_TOOL,
    NOTHING,
    OUTPUT_CONFIG,
    supported_fields,
)


def parse_messages(given: dict[str, Any]) -> MessagesRequest:
    """Raises ApiError."""
    return validated(
        MessagesRequest, _supported_parts(supported_fields(given, MessagesRequest.model_fields, MESSAGES, ""))
    )


def parse_count_tokens(given: dict[str, Any]) -> CountTokensRequest:
    """Raises ApiError."""
    fields = supported_fields(given, CountTokensRequest.model_fields, MESSAGES, "")
    return validated(CountTokensRequest, _supported_parts(fields))


_BLOCKS: Mapping[str, type[BaseModel]] = {
    "text": TextBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}


def _supported_parts(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without parts that change nothing; what has a wrong type is left to the type check."""
    parts = dict(fields)
    parts["messages"] = each(
        parts.get("messages"),
        "messages",
        lambda message, path: _with_blocks(kept(message, MessageParam, NOTHING, path), path),
    )
    parts["system"] = _blocks(parts.get("system"), "system")
    parts["tools"] = each(parts.get("tools"), "tools", _tool)
    parts["tool_choice"] = kept(parts.get("tool_choice"), MessagesToolChoice, NOTHING, "tool_choice")
    parts["output_config"] = kept(parts.get("output_config"), OutputConfig, OUTPUT_CONFIG, "output_config")
    return {name: value for name, value in parts.items() if name in fields}


def _with_blocks(fields: object, path: str) -> object:
    """The object at `path`, its content without what changes nothing."""
    if isinstance(fields, dict) and "content" in fields:
        return {**fields, "content": _blocks(fields["content"], f"{path}.content")}
    return fields


def _blocks(given: object, path: str) -> object:
    return each(given, path, _supported_block)


def _supported_block(block: object, path: str) -> object:
    if not isinstance(block, dict):
        raise bad_request(f"{path} must be an object", path, "invalid_type")
    kind = block.get("type")
    model = _BLOCKS.get(kind) if isinstance(kind, str) else None
    if model is None:
        message = f"{path}.type is {str(kind)[:40]!r}; it must be one of {', '.join(_BLOCKS)}"
        raise bad_request(message, f"{path}.type", "unsupported_field" if isinstance(kind, str) else "invalid_type")
    return _with_blocks(kept(block, model, MESSAGES_BLOCK, path), path)


def _tool(given: object, path: str) -> object:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "custom":
        message = f"{path}.type is {kind[:40]!r}; only tools of the type custom are supported, which the client runs"
        raise bad_request(message, f"{path}.type", "unsupported_field")
    return kept(given, MessagesTool, MESSAGES_TOOL, path)
