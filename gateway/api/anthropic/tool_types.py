"""Tools in requests of Anthropic's Messages API: names and types. Must not know HTTP."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.http.body import Body, LeftOutTool, any_value, tool_type
from gateway.errors import bad_request
from gateway.tools.request import Choice, NamedChoice, Tool


class MessagesTool(Body):
    """A function that an answer may call."""

    ignored = {
        **any_value("cache_control", "eager_input_streaming"),
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
    tool_type("messages", "custom"),
]


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
        if self.name is not None:
            return NamedChoice(self.name, "tool_choice.name")
        words: Mapping[str, Choice] = {"auto": "auto", "any": "required", "none": "none"}
        return words[self.type]
