"""Messages and tools in requests of Anthropic's Messages API."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.http.body import (
    Body,
    Ignored,
    ImageBody,
    LeftOutTool,
    Many,
    TextOr,
    any_value,
    by_type,
    joined,
    only_null,
)
from gateway.errors import bad_request
from gateway.images.parts import ImagePart
from gateway.request.marks import Mark
from gateway.tools.history import check_arguments, join_parts, parts_of, template_call
from gateway.tools.request import Choice, NamedChoice, Tool

_BLOCK: Ignored = {
    **only_null("toolset_name"),
    "caller": ({"type": "direct"},),
    "citations": ([],),
}


class CacheControl(Body):
    """Keeps the KV of what goes before, and of this."""

    ignored = any_value("scope")

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = Field("5m", description="For how long; within the key's share of a worker's memory.")


class Markable(Body):
    """Part of a prompt that can end what is kept."""

    cache_control: CacheControl | None = None


class TextBlock(Markable):
    """Text."""

    ignored = _BLOCK
    types, types_rule = ("text",), "this service takes text and images only"

    type: Literal["text"]
    text: str


class Base64Source(Body):
    """The file of an image."""

    ignored = {}
    types, types_rule = ("base64",), "it must be base64 or url"

    type: Literal["base64"]
    media_type: str
    data: str = Field(description="The file in base64.")


class UrlSource(Body):
    """Where an image is."""

    ignored = {}

    type: Literal["url"]
    url: str = Field(description="Of a host that is allowed, or a data URI.")


class ImageBlock(Markable, ImageBody):
    """An image."""

    ignored = _BLOCK

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("~base64")] | Annotated[UrlSource, Tag("~url")], by_type("base64", "url")
    ]

    def image(self, path: str) -> ImagePart:
        if isinstance(self.source, UrlSource):
            return ImagePart(self.source.url, f"{path}.source.url")
        return ImagePart(f"data:{self.source.media_type};base64,{self.source.data}", f"{path}.source.data")


_TextOrImage = Annotated[
    Annotated[TextBlock, Tag("~text")] | Annotated[ImageBlock, Tag("~image")], by_type("text", "image")
]


class ToolUseBlock(Markable):
    """A call in an assistant's message."""

    ignored = _BLOCK

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultBlock(Markable):
    """The result of a call."""

    ignored = _BLOCK

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[Many[_TextOrImage]] | None = None
    is_error: bool | None = Field(None, description='Begins the text with "Error: ".')


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
    | Annotated[ImageBlock, Tag("~image")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedThinkingBlock, Tag("~redacted_thinking")],
    by_type(),
]
_ROLES: Mapping[type[Body], str] = {  # block |-> the only role that can have it; text has every role
    ImageBlock: "user",
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
}


class MessageParam(Body):
    """One message of a conversation."""

    ignored = {}

    role: Literal["user", "assistant", "system"]
    content: TextOr[Many[_Block]]

    def plain(self, path: str) -> list[dict[str, Any]]:
        """The message as chat templates take it: each result of a call becomes its own message. Raises ApiError."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        said: list[str | ImagePart] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for index, block in enumerate(self.content):
            block_path = f"{path}.content[{index}]"
            if _ROLES.get(type(block), self.role) != self.role:
                message = f"{block_path}.type is {block.type!r}, which the role {self.role!r} cannot have"
                raise bad_request(message, f"{block_path}.type")
            match block:
                case TextBlock():
                    said.append(block.text)
                case ImageBlock():
                    said.append(block.image(block_path))
                case ThinkingBlock():
                    reasoning.append(block.thinking)
                case ToolUseBlock():
                    arguments = check_arguments(block.input, f"{block_path}.input")
                    calls.append(template_call(block.id, block.name, arguments))
                case ToolResultBlock():
                    if said:
                        raise bad_request(f"{block_path}: results of calls come before text", block_path)
                    found = parts_of(joined(block.content or "", f"{block_path}.content"))
                    result = join_parts(["Error: ", *found] if block.is_error else found)
                    results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        if results and not said:
            return results
        plain: dict[str, Any] = {"role": self.role, "content": join_parts(said)}
        plain |= {"tool_calls": calls} if calls else {}
        return [*results, plain | ({"reasoning_content": "".join(reasoning)} if reasoning else {})]


class MessagesTool(Markable):
    """A function that an answer may call."""

    ignored = {
        **any_value("eager_input_streaming"),
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }
    types, types_rule = ("custom",), "only tools of the type custom are supported, which the client runs"

    type: Literal["custom"] | None = None
    name: str = Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of its arguments, an object.")
    strict: bool | None = Field(None, description="Arguments always fit `input_schema`.")

    def tool(self, path: str) -> Tool:
        """`path`: its field, for errors."""
        return Tool(self.name, self.description, self.input_schema, bool(self.strict), path, f"{path}.input_schema")


AnyTool = Annotated[
    Annotated[MessagesTool, Tag("~custom")] | Annotated[LeftOutTool, Tag("~left_out")],
    by_type("custom", left_out=re.compile(r"(web_search|web_fetch|code_execution)_\d{8}")),
]
KEPT_S = {"5m": 300.0, "1h": 3600.0}


def find_marks(parts: Iterable[tuple[int, Body]]) -> list[Mark]:
    """`parts`: with the number of messages up to each. For each time the longest part, the longest first."""
    found: dict[float, int] = {}
    for num_messages, part in parts:
        control = part.cache_control if isinstance(part, Markable) else None
        if control is not None:
            seconds = KEPT_S[control.ttl]
            found[seconds] = max(found.get(seconds, 0), num_messages)
    return sorted((Mark(count, seconds) for seconds, count in found.items()), reverse=True)


_CHOICES: Mapping[str, Choice] = {"auto": "auto", "any": "required", "none": "none"}


class MessagesToolChoice(Body):
    """Whether the answer calls a tool, and which."""

    ignored = {}

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> Choice | NamedChoice:
        """Raises ApiError if the type tool has no name, or another type has one."""
        if (self.type == "tool") != (self.name is not None):
            verb = "is missing, which the type tool needs" if self.type == "tool" else "needs the type tool"
            raise bad_request(f"tool_choice.name {verb}", "tool_choice.name")
        return _CHOICES[self.type] if self.name is None else NamedChoice(self.name, "tool_choice.name")
