"""Messages in requests of Anthropic's Messages API: names and types of their blocks. Must not know HTTP."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.http.body import Body, FirstErrorOnly, TextOr, any_value, by_type, joined, only_null
from gateway.errors import bad_request
from gateway.request.left_out import Ignored
from gateway.tools.history import template_call

_BLOCK: Ignored = {
    **any_value("cache_control"),
    **only_null("toolset_name"),
    "caller": ({"type": "direct"},),
    "citations": ([],),
}


class TextBlock(Body):
    """Text."""

    ignored = _BLOCK
    types, types_rule = ("text",), "this service takes text only"

    type: Literal["text"]
    text: str


TextOrBlocks = TextOr[Annotated[list[TextBlock], FirstErrorOnly()]]


class ToolUseBlock(Body):
    """A call in an assistant's message."""

    ignored = _BLOCK

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]

    def plain(self, path: str) -> dict[str, Any]:
        """As chat templates take it. Raises ApiError."""
        try:
            return template_call(self.id, self.name, json.dumps(self.input, ensure_ascii=False, allow_nan=False))
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{path}.input: {str(error)[:200]}", f"{path}.input") from error


class ToolResultBlock(Body):
    """The result of a call."""

    ignored = _BLOCK

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks | None = None
    is_error: bool | None = Field(None, description='Begins the text with "Error: ".')

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        text = joined(self.content or "")
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": f"Error: {text}" if self.is_error else text,
        }


class ThinkingBlock(Body):
    """Reasoning before an answer."""

    ignored = any_value("signature")

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Reasoning that another service has encrypted; not used."""

    type: Literal["redacted_thinking"]
    data: str


_Block = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedThinkingBlock, Tag("~redacted_thinking")],
    by_type(),
]
_Blocks = Annotated[list[_Block], FirstErrorOnly()]
_ROLES: Mapping[type[Body], str] = {  # block |-> the only role that can have it; text has every role
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
}


class MessageParam(Body):
    """One message of a conversation."""

    ignored = {}

    role: Literal["user", "assistant", "system"]
    content: TextOr[_Blocks]

    def plain(self, path: str) -> list[dict[str, Any]]:
        """As chat templates take it: each result of a call becomes its own message. Raises ApiError."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for index, block in enumerate(self.content):
            block_path = f"{path}.content[{index}]"
            if _ROLES.get(type(block), self.role) != self.role:
                raise bad_request(
                    f"{block_path}.type is {block.type!r}, which the role {self.role!r} cannot have",
                    f"{block_path}.type",
                )
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    reasoning.append(block.thinking)
                case ToolUseBlock():
                    calls.append(block.plain(block_path))
                case ToolResultBlock():
                    if texts:
                        raise bad_request(f"{block_path}: results of calls come before text", block_path)
                    results.append(block.plain())
        if results and not texts:
            return results
        said: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
        said |= {"tool_calls": calls} if calls else {}
        return [*results, said | ({"reasoning_content": "".join(reasoning)} if reasoning else {})]
