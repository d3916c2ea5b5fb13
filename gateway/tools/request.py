"""Rules for tools and tool_choice, the same for REST and gRPC. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.errors import bad_request, check_count
from gateway.tools.formats import ENFORCED, Format
from gateway.tools.json_schema import Comparisons, as_object, check_enforced, takes_objects_only
from gateway.tools.json_text import check_depth

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024  # of all tools as JSON
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # JSON schema of the arguments; None: it takes none
    is_strict: bool = False  # arguments must fit `parameters` even where the model is free to call or not
    param: str = "tools"  # the client's field of it, for errors
    schema_param: str = "tools"  # that of its parameters

    @property
    def schema(self) -> Mapping[str, Any]:
        return {"type": "object", "properties": {}} if self.parameters is None else as_object(self.parameters)

    def as_template_input(self) -> dict[str, Any]:
        """As chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.schema)}}


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """This tool must be called."""

    name: str
    param: str  # field of the name, for errors


@dataclass(frozen=True, slots=True)
class RawTools:
    """A client's tools: types are right, values unchecked. None: not given."""

    tools: Sequence[Tool] = ()
    choice: Choice | NamedChoice | None = None
    is_parallel: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools after validation: what an answer may or must call."""

    format: Format
    tools: tuple[Tool, ...]  # at least one; names are unique
    is_required: bool  # the answer must have at least one call
    named: str | None  # the only tool that may be called, if one was named; then is_required
    is_parallel: bool  # the answer may have several calls
    warnings: tuple[str, ...] = ()  # parts of schemas that are not enforced, for the client

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))


def check_tools(raw: RawTools, format: Format | None) -> ToolUse | None:
    """Returns None if nothing may be called. `format`: how the model writes calls. Raises ApiError."""
    check_count("tools", len(raw.tools), MAX_TOOLS, "tools")
    seen: set[str] = set()
    for tool in raw.tools:
        _check_tool(tool, seen)
    try:
        num_bytes = len(json.dumps([tool.as_template_input() for tool in raw.tools], allow_nan=False))
    except ValueError as error:
        raise bad_request(f"tools is not valid JSON: {error}", "tools") from error
    check_count("tools", num_bytes, MAX_TOOLS_BYTES, "bytes as JSON")
    named = raw.choice if isinstance(raw.choice, NamedChoice) else None
    is_required = named is not None or raw.choice == "required"
    warnings: list[str] = []
    comparisons = Comparisons()
    for tool in raw.tools:
        path = tool.schema_param
        if tool.is_strict or (is_required and (named is None or named.name == tool.name)):
            warnings += check_enforced(tool.schema, path, comparisons, is_strict=tool.is_strict)
        if (tool.is_strict or is_required) and not takes_objects_only(tool.schema):
            why = "where it names another keyword than 'type' and 'properties', that one decides what it takes"
            raise bad_request(
                f"{path} takes more than objects, and arguments are one: {why}; give each choice the type 'object'",
                path,
            )
    if not raw.tools and (is_required or raw.choice == "auto"):
        verb = "asks for" if is_required else "allows"
        raise bad_request(f"tool_choice {verb} a call, but there are no tools; send some", "tool_choice")
    if named and all(tool.name != named.name for tool in raw.tools):
        raise bad_request(f"tool_choice names {named.name[:64]!r}, which is not among the tools", named.param)
    if not raw.tools or raw.choice == "none":
        return None
    if format is None:
        raise bad_request("the model's chat template knows no tools; send none", "tools")
    if format.name not in ENFORCED:
        _check_free(raw, is_required, format)
    is_parallel = raw.is_parallel is not False
    return ToolUse(format, tuple(raw.tools), is_required, named.name if named else None, is_parallel, tuple(warnings))


def _check_free(raw: RawTools, is_required: bool, format: Format) -> None:
    """Raises ApiError if calls must be enforced, which they cannot be in this format."""
    strict = next((tool for tool in raw.tools if tool.is_strict), None)
    if not is_required and strict is None:
        return
    path = "tool_choice" if is_required or strict is None else strict.param
    why = "in a way not known here" if format.form == "plain" else f"as {format.name}, which cannot be enforced"
    raise bad_request(
        f"{path} asks for a call to be enforced, but the model writes calls {why}; leave it to the model, or have the "
        "service started with another --tool-format",
        path,
    )


def _check_tool(tool: Tool, seen: set[str]) -> None:
    """`seen`: the names of the tools before it, to which its own is added."""
    name, path = f"{tool.param}.name", tool.schema_param
    if not _NAME.fullmatch(tool.name):
        raise bad_request(f"{name} is {tool.name[:80]!r}; it must be 1 to 64 letters, digits, '_' or '-'", name)
    if tool.name in seen:
        raise bad_request(f"{name} is {tool.name!r}, as another tool's; rename one", name)
    if tool.schema.get("type", "object") != "object":
        raise bad_request(f"{path} must have the type 'object'", path)
    try:
        check_depth(tool.schema)
    except ValueError as error:
        raise bad_request(f"{path}: {error}", path) from error
    seen.add(tool.name)
