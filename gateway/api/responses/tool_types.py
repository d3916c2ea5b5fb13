"""Tools in requests of OpenAI's Responses API: names and types, and how they become functions. Must not know HTTP.

A function in a namespace is `NAMESPACE__NAME` to the model, a custom tool a function of one text, `input`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, Tag

from gateway.api.http.body import Body, FirstErrorOnly, LeftOutTool, tool_type
from gateway.request.left_out import Ignored
from gateway.tools.request import Tool

_TOOL: Ignored = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
_NAME: Any = Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})


@dataclass(frozen=True, slots=True)
class Called:
    """What the client calls a function."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


CalledByName = Mapping[str, Called]  # the model's name of a tool |-> the client's, where they differ


def flat_name(name: str, namespace: str | None) -> str:
    """The model's name of a function."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """A call of a custom tool as that of a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call; arguments that have none as they are."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, Any]).get("input")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, str) else arguments


class FunctionTool(Body):
    """A function that an answer may call."""

    ignored = _TOOL
    types, types_rule = ("function",), "only function, namespace and custom tools are supported, which the client runs"

    type: Literal["function"]
    name: str = _NAME
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments, an object.")
    strict: bool | None = Field(None, description="Arguments always fit `parameters`, also where the model is free.")

    def tools(self, path: str) -> list[Tool]:
        """As the model sees it. `path`: its field, for errors."""
        schema_path = f"{path}.parameters"
        return [Tool(self.name, self.description, self.parameters, bool(self.strict), path, schema_path)]

    def called(self) -> CalledByName:
        return {}


class CustomFormat(Body):
    """What a custom tool's text must match."""

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

    def tools(self, path: str) -> list[Tool]:
        """As the model sees it. `path`: its field, for errors."""
        told = self.format.definition if self.format else None
        grammar = f"The input matches this grammar:\n{told}" if told else ""
        description = "\n\n".join(part for part in (self.description, grammar) if part) or None
        text = {"type": "string"} if self._pattern is None else {"type": "string", "pattern": self._pattern}
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return [Tool(self.name, description, schema, self._pattern is not None, path, f"{path}.format.definition")]

    def called(self) -> CalledByName:
        return {self.name: Called(self.name, is_custom=True)}


class NamespaceTool(Body):
    """Tools whose names belong together."""

    ignored = {}

    type: Literal["namespace"]
    name: str = _NAME
    description: str | None = Field(None, description="Not used.")
    inner: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("~function")]
                | Annotated[CustomTool, Tag("~custom")]
                | Annotated[LeftOutTool, Tag("~left_out")],
                tool_type("responses", "function", "custom"),
            ]
        ],
        FirstErrorOnly(),
    ] = Field(alias="tools")

    def warnings(self, path: str = "") -> Iterator[str]:
        yield f"{path.removesuffix('.')} is flattened: its functions are {flat_name('NAME', self.name[:64])}"
        yield from super().warnings(path)

    def tools(self, path: str) -> list[Tool]:
        """As the model sees them. `path`: its field, for errors."""
        return [
            replace(one, name=flat_name(one.name, self.name))
            for index, tool in enumerate(self.inner)
            if not isinstance(tool, LeftOutTool)
            for one in tool.tools(f"{path}.tools[{index}]")
        ]

    def called(self) -> CalledByName:
        return {
            flat_name(tool.name, self.name): Called(tool.name, self.name, isinstance(tool, CustomTool))
            for tool in self.inner
            if not isinstance(tool, LeftOutTool)
        }


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("~function")]
    | Annotated[CustomTool, Tag("~custom")]
    | Annotated[NamespaceTool, Tag("~namespace")]
    | Annotated[LeftOutTool, Tag("~left_out")],
    tool_type("responses", "function", "custom", "namespace"),
]


class FunctionChoice(Body):
    """The tool that must be called."""

    ignored = {}

    type: Literal["function", "custom"]
    name: str
