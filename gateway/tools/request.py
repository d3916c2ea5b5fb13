"""Rules for tools and tool_choice, the same for REST and gRPC. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.errors import bad_request, check_count
from gateway.tools.json_schema import Comparisons, as_object, check_enforced
from gateway.tools.json_text import check_depth
from gateway.tools.values import value_types
from wire.dialects import Format

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024  # of all tools as JSON
_PLAIN_WARNING = "calls are not read: the model writes them in a way not known here; --tool-format can name one"
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
        """The tool as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.schema)}}


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """This tool must be called."""

    name: str
    param: str  # field of the name, for errors


@dataclass(frozen=True, slots=True)
class AllowedChoice:
    """A client's choice of tools: these may be called, or one of them must be."""

    names: Sequence[str]
    mode: Literal["auto", "required"]
    param: str  # field of the names, for errors


@dataclass(frozen=True, slots=True)
class RawTools:
    """A client's tools: types are right, values unchecked. None: not given."""

    tools: Sequence[Tool] = ()
    choice: Choice | NamedChoice | AllowedChoice | None = None
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
    allowed: frozenset[str] | None = None  # the tools that may be called; None: all, or the one that was named

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        allowed = frozenset((self.named,)) if self.named is not None else self.allowed
        return tuple(tool for tool in self.tools if allowed is None or tool.name in allowed)


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
    choice = raw.choice
    named = choice if isinstance(choice, NamedChoice) else None
    allowed = choice if isinstance(choice, AllowedChoice) else None
    mode = "required" if named else allowed.mode if allowed else choice
    is_required = mode == "required"
    names = (named.name,) if named else allowed.names if allowed else [tool.name for tool in raw.tools]
    warnings: list[str] = []
    comparisons = Comparisons()
    for tool in raw.tools:
        path = tool.schema_param
        if tool.is_strict or (is_required and tool.name in names):
            warnings += check_enforced(tool.schema, path, comparisons, is_strict=tool.is_strict)
        if (tool.is_strict or is_required) and value_types(tool.schema, tool.schema) != {"object"}:
            why = "where it names another keyword than 'type' and 'properties', that one decides what it takes"
            raise bad_request(
                f"{path} takes more than objects, and arguments are one: {why}; give each choice the type 'object'",
                path,
            )
    if not raw.tools and mode in ("required", "auto"):
        verb = "asks for" if is_required else "allows"
        raise bad_request(f"tool_choice {verb} a call, but there are no tools; send some", "tool_choice")
    given = named or allowed
    if given and (unknown := set(names) - seen):
        raise bad_request(f"tool_choice names {min(unknown)[:64]!r}, which is not among the tools", given.param)
    if allowed and not names:
        raise bad_request(f"{allowed.param} names no tool; name one, or use the tool_choice 'none'", allowed.param)
    if not raw.tools or choice == "none":
        return None
    if format is None:
        raise bad_request("the model's chat template knows no tools; send none", "tools")
    if not format.is_enforced:
        warnings += _check_free(raw, is_required, format)
    return ToolUse(
        format,
        tuple(raw.tools),
        is_required,
        named.name if named else None,
        raw.is_parallel is not False,
        tuple(warnings),
        frozenset(allowed.names) if allowed else None,
    )


def _check_free(raw: RawTools, is_required: bool, format: Format) -> list[str]:
    """Refuses what must be enforced in a format in which nothing can be. Returns warnings."""
    strict = next((tool for tool in raw.tools if tool.is_strict), None)
    if is_required or strict is not None:
        path = "tool_choice" if is_required or strict is None else strict.param
        why = "in a way not known here" if format.name == "plain" else f"as {format.name}, which cannot be enforced"
        raise bad_request(
            f"{path} asks for a call to be enforced, but the model writes calls {why}; leave it to the model, or have "
            "the service started with another --tool-format",
            path,
        )
    warnings = [] if format.call else [_PLAIN_WARNING]
    if raw.is_parallel is False:
        warnings.append(f"parallel_tool_calls has no effect: the model writes calls as {format.name}")
    return warnings


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
