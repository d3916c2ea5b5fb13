"""Tools in OpenAI's requests: names and types. gateway/tools/request.py checks values. Must not know HTTP."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag

from gateway.api.http.body import Body, FirstErrorOnly
from gateway.tools.history import read_arguments, template_call
from gateway.tools.request import MAX_TOOLS, Choice, NamedChoice, RawTools, Tool


def _word_or_named(value: object) -> str:
    return "~word" if isinstance(value, str) else "~named"


Named = TypeVar("Named")
# A word, or an object of this type, which names a tool.
ChoiceOr = Annotated[Annotated[Choice, Tag("~word")] | Annotated[Named, Tag("~named")], Discriminator(_word_or_named)]


def _arguments(text: str) -> str:
    read_arguments(text)
    return text


ArgumentsText = Annotated[str, AfterValidator(_arguments)]


class FunctionDefinition(Body):
    """A function that an answer may call."""

    name: str = Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments, an object.")
    strict: bool | None = Field(None, description="Arguments always fit `parameters`, also where the model is free.")


class ToolDefinition(Body):
    """A tool; all are functions."""

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self, path: str) -> Tool:
        """`path`: its field, for errors."""
        function, path = self.function, f"{path}.function"
        return Tool(
            function.name, function.description, function.parameters, bool(function.strict), path, f"{path}.parameters"
        )


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedToolChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[ToolDefinition], FirstErrorOnly()]
ToolChoice = ChoiceOr[NamedToolChoice]
_NAME = "tool_choice.function.name"
TOOLS_FIELD = Field(None, description="Functions that the answer may call.", json_schema_extra={"maxItems": MAX_TOOLS})


class FunctionCall(Body):
    """The called function and its arguments."""

    name: str = Field(min_length=1)
    arguments: ArgumentsText = Field(description="A JSON object as text.")


class MessageToolCall(Body):
    """A call in an assistant's message."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="Not used; clients that join streamed chunks leave it in.")

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        return template_call(self.id, self.function.name, self.function.arguments)


MessageToolCalls = Annotated[list[MessageToolCall], FirstErrorOnly()]


def raw_tools(
    tools: list[ToolDefinition] | None, choice: Choice | NamedToolChoice | None, is_parallel: bool | None
) -> RawTools:
    """A request's tools without their wire format."""
    return RawTools(
        [item.tool(f"tools[{index}]") for index, item in enumerate(tools or ())],
        choice=NamedChoice(choice.function.name, _NAME) if isinstance(choice, NamedToolChoice) else choice,
        is_parallel=is_parallel,
    )
