"""Items and tools in requests of OpenAI's Responses API, and how tools become functions.

A function in a namespace is `NAMESPACE__NAME` to the model, a custom tool a function of one text, `input`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.http.body import (
    ANY,
    DETAIL_FIELD,
    Body,
    Ignored,
    ImageBody,
    LeftOutTool,
    Many,
    TextOr,
    any_value,
    by_type,
    only_null,
)
from gateway.images.parts import ImagePart
from gateway.request.rules import MAX_MESSAGES
from gateway.tools.request import MAX_TOOLS, AllowedChoice, Choice, NamedChoice, Tool

_ITEM: Ignored = {
    **any_value("id", "phase", "status"),
    **only_null("namespace"),
    "async": (False,),
    "caller": ({"type": "direct"},),
}


class ResponsesTextPart(Body):
    """Text of a message or an answer."""

    ignored = {"annotations": ([],), "logprobs": (ANY,), "prompt_cache_breakpoint": (ANY,)}
    types, types_rule = ("input_text", "output_text"), "it must be input_text, input_image or output_text"

    type: Literal["input_text", "output_text"]
    text: str


class InputImagePart(ImageBody):
    """An image of a message or a call's result."""

    ignored = {"prompt_cache_breakpoint": (ANY,), "file_id": ()}

    type: Literal["input_image"]
    image_url: str = Field(description="As in chats: a data URI with the file, or a URL of a host that is allowed.")
    detail: Literal["auto", "low", "high", "original"] | None = DETAIL_FIELD

    def image(self, path: str) -> ImagePart:
        return ImagePart(self.image_url, f"{path}.image_url")


_Part = Annotated[
    Annotated[ResponsesTextPart, Tag("~input_text")] | Annotated[InputImagePart, Tag("~input_image")],
    by_type("input_text", "input_image"),
]
_TextOrParts = TextOr[Many[_Part]]


class InputMessage(Body):
    """One message of a conversation."""

    ignored = _ITEM

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _TextOrParts


class FunctionCallItem(Body):
    """A call in an earlier answer."""

    ignored = _ITEM

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str = Field(description="A JSON object as text.")


class CustomCallItem(Body):
    """A call of a custom tool in an earlier answer."""

    ignored = _ITEM

    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    input: str


class CallOutput(Body):
    ignored = _ITEM

    call_id: str
    output: _TextOrParts


class FunctionCallOutput(CallOutput):
    """The result of a call."""

    type: Literal["function_call_output"]


class CustomCallOutput(CallOutput):
    """The result of a custom tool's call."""

    type: Literal["custom_tool_call_output"]


class ReasoningPart(Body):
    """Reasoning, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning before an answer."""

    ignored = {**_ITEM, "encrypted_content": ()}

    type: Literal["reasoning"]
    summary: Many[ReasoningPart] | None = None
    content: Many[ReasoningPart] | None = None


_Item = Annotated[
    Annotated[InputMessage, Tag("~message")]
    | Annotated[FunctionCallItem, Tag("~function_call")]
    | Annotated[FunctionCallOutput, Tag("~function_call_output")]
    | Annotated[CustomCallItem, Tag("~custom_tool_call")]
    | Annotated[CustomCallOutput, Tag("~custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    by_type(default="message"),
]
Items = Annotated[Many[_Item], Field(min_length=1, max_length=MAX_MESSAGES)]


_TOOL: Ignored = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
_NAME: Any = Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})
_LEFT_OUT = re.compile(r"web_search(_preview)?(_\d{4}_\d\d_\d\d)?|image_generation|code_interpreter")


@dataclass(frozen=True, slots=True)
class Called:
    """The client's name of a function."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


CalledByName = Mapping[str, Called]  # the model's name of a tool |-> the client's


def flat_name(name: str, namespace: str | None) -> str:
    """The model's name of a function."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


class FunctionTool(Body):
    """A function that an answer may call."""

    ignored = _TOOL
    types, types_rule = ("function",), "only function, namespace and custom tools are supported, which the client runs"

    type: Literal["function"]
    name: str = _NAME
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments, an object.")
    strict: bool | None = Field(None, description="Arguments always fit `parameters`, also where the model is free.")

    def tool(self, path: str, namespace: str | None) -> Tool:
        """`path`: its field, for errors."""
        name, schema_path = flat_name(self.name, namespace), f"{path}.parameters"
        return Tool(name, self.description, self.parameters, bool(self.strict), path, schema_path)


class CustomFormat(Body):
    """The form that a custom tool's text must match."""

    type: Literal["text", "grammar"]
    syntax: Literal["regex", "lark"] | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool that takes any text, or one that matches a grammar. Texts are made to match expressions only."""

    ignored = _TOOL

    type: Literal["custom"]
    name: str = _NAME
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def _pattern(self) -> str | None:
        return self.format.definition if self.format and self.format.syntax == "regex" else None

    def warnings(self, path: str = "") -> Iterator[str]:
        if self.format and self.format.definition and self._pattern is None:
            yield f"{path}format is told to the model and not enforced"

    def tool(self, path: str, namespace: str | None) -> Tool:
        """A function of one text. `path`: its field, for errors."""
        told, pattern = self.format.definition if self.format else None, self._pattern
        grammar = f"The input matches this grammar:\n{told}" if told else ""
        description = "\n\n".join(part for part in (self.description, grammar) if part) or None
        text = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        name, schema_path = flat_name(self.name, namespace), f"{path}.format.definition"
        return Tool(name, description, schema, pattern is not None, path, schema_path)


class NamespaceTool(Body):
    """Tools whose names belong together."""

    ignored = {}

    type: Literal["namespace"]
    name: str = _NAME
    description: str | None = Field(None, description="Not used.")
    inner: Many[
        Annotated[
            Annotated[FunctionTool, Tag("~function")]
            | Annotated[CustomTool, Tag("~custom")]
            | Annotated[LeftOutTool, Tag("~left_out")],
            by_type("function", "custom", left_out=_LEFT_OUT),
        ]
    ] = Field(alias="tools")

    def warnings(self, path: str = "") -> Iterator[str]:
        yield f"{path.removesuffix('.')} is flattened: its functions are {flat_name('NAME', self.name[:64])}"
        yield from super().warnings(path)


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("~function")]
    | Annotated[CustomTool, Tag("~custom")]
    | Annotated[NamespaceTool, Tag("~namespace")]
    | Annotated[LeftOutTool, Tag("~left_out")],
    by_type("function", "custom", "namespace", left_out=_LEFT_OUT),
]


def flat_tools(
    tools: Sequence[FunctionTool | CustomTool | NamespaceTool | LeftOutTool], path: str, namespace: str | None = None
) -> Iterator[tuple[Tool, Called]]:
    """Tools as the model sees them, and as the client calls them. `path`: their field, for errors."""
    for index, tool in enumerate(tools):
        place = f"{path}[{index}]"
        if isinstance(tool, NamespaceTool):
            yield from flat_tools(tool.inner, f"{place}.tools", tool.name)
        elif not isinstance(tool, LeftOutTool):
            yield tool.tool(place, namespace), Called(tool.name, namespace, isinstance(tool, CustomTool))


class FunctionChoice(Body):
    """The tool that must be called."""

    ignored = {}

    type: Literal["function", "custom"]
    name: str


class AllowedToolsChoice(Body):
    """The only tools that may be called, or of which one must be; the prompt still shows all."""

    ignored = {}

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[FunctionChoice] = Field(json_schema_extra={"minItems": 1, "maxItems": MAX_TOOLS})


AnyChoice = Annotated[
    Annotated[FunctionChoice, Tag("~function")] | Annotated[AllowedToolsChoice, Tag("~allowed_tools")],
    by_type("function", "allowed_tools"),
]


def raw_choice(
    given: Choice | FunctionChoice | AllowedToolsChoice | None,
) -> Choice | NamedChoice | AllowedChoice | None:
    """A choice without its wire format; None for auto, which clients send without tools, too."""
    match given:
        case FunctionChoice():
            return NamedChoice(given.name, "tool_choice.name")
        case AllowedToolsChoice():
            return AllowedChoice([tool.name for tool in given.tools], given.mode, "tool_choice.tools")
    return None if given == "auto" else given
