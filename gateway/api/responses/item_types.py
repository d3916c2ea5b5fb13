"""Items in requests of OpenAI's Responses API: names and types. Must not know HTTP."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from gateway.api.http.body import Body, FirstErrorOnly, TextOr, any_value, by_type, only_null
from gateway.api.openai.tool_types import ArgumentsText
from gateway.api.responses.tool_types import custom_arguments
from gateway.request.left_out import ANY, Ignored
from gateway.request.rules import MAX_MESSAGES

_ITEM: Ignored = {
    **any_value("id", "phase", "status"),
    **only_null("namespace"),
    "async": (False,),
    "caller": ({"type": "direct"},),
}


class ResponsesTextPart(Body):
    """Text of a message or an answer."""

    ignored = {"annotations": ([],), "logprobs": (ANY,), "prompt_cache_breakpoint": (ANY,)}
    types, types_rule = ("input_text", "output_text"), "it must be input_text or output_text"

    type: Literal["input_text", "output_text"]
    text: str


_TextOrParts = TextOr[Annotated[list[ResponsesTextPart], FirstErrorOnly()]]


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
    arguments: ArgumentsText = Field(description="A JSON object as text.")


class CustomCallItem(Body):
    """A call of a custom tool in an earlier answer."""

    ignored = _ITEM

    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    input: str

    @property
    def arguments(self) -> str:
        """Those of the function that the model sees."""
        return custom_arguments(self.input)


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
    summary: Annotated[list[ReasoningPart], FirstErrorOnly()] | None = None
    content: Annotated[list[ReasoningPart], FirstErrorOnly()] | None = None


_Item = Annotated[
    Annotated[InputMessage, Tag("~message")]
    | Annotated[FunctionCallItem, Tag("~function_call")]
    | Annotated[FunctionCallOutput, Tag("~function_call_output")]
    | Annotated[CustomCallItem, Tag("~custom_tool_call")]
    | Annotated[CustomCallOutput, Tag("~custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    by_type(default="message"),
]
Items = Annotated[list[_Item], FirstErrorOnly(), Field(min_length=1, max_length=MAX_MESSAGES)]
