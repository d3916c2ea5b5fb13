"""Chats and their tools in OpenAI's requests, and what answers must match."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from gateway.api.http.body import (
    DETAIL_FIELD,
    Body,
    ImageBody,
    Many,
    TextOr,
    Texts,
    WordOr,
    any_value,
    by_type,
    joined,
    only_null,
)
from gateway.errors import bad_request
from gateway.images.parts import ImagePart
from gateway.request.types import AnswerForm, Chat, Prompt
from gateway.tools.history import read_arguments, template_call
from gateway.tools.json_text import JsonTexts
from gateway.tools.request import MAX_TOOLS, AllowedChoice, Choice, NamedChoice, RawTools, Tool
from gateway.tools.template_options import check_options, effort_options

STRICT = "Refuses a schema of which a part cannot be enforced; otherwise that part is left to the model."


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


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedToolChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Functions of which answers may or must call some; the prompt still shows all."""

    mode: Literal["auto", "required"]
    tools: Many[NamedToolChoice] = Field(json_schema_extra={"minItems": 1, "maxItems": MAX_TOOLS})


class AllowedToolChoice(Body):
    """The only functions that may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Many[ToolDefinition]
ToolChoice = WordOr[
    Choice,
    Annotated[
        Annotated[NamedToolChoice, Tag("~function")] | Annotated[AllowedToolChoice, Tag("~allowed_tools")],
        by_type("function", "allowed_tools"),
    ],
]
TOOLS_FIELD = Field(None, description="Functions that the answer may call.", json_schema_extra={"maxItems": MAX_TOOLS})


def raw_tools(
    tools: list[ToolDefinition] | None,
    choice: Choice | NamedToolChoice | AllowedToolChoice | None,
    is_parallel: bool | None,
) -> RawTools:
    """A request's tools without their wire format."""
    raw = []
    for index, one in enumerate(tool.function for tool in tools or ()):
        path = f"tools[{index}].function"
        raw.append(Tool(one.name, one.description, one.parameters, bool(one.strict), path, f"{path}.parameters"))
    if isinstance(choice, NamedToolChoice):
        return RawTools(raw, NamedChoice(choice.function.name, "tool_choice.function.name"), is_parallel)
    if isinstance(choice, AllowedToolChoice):
        given = choice.allowed_tools
        names = [tool.function.name for tool in given.tools]
        return RawTools(raw, AllowedChoice(names, given.mode, "tool_choice.allowed_tools.tools"), is_parallel)
    return RawTools(raw, choice, is_parallel)


class FunctionCall(Body):
    """The called function and its arguments."""

    name: str = Field(min_length=1)
    arguments: str = Field(description="A JSON object as text.")


class MessageToolCall(Body):
    """A call in an assistant's message."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="Not used; clients that join streamed chunks leave it in.")


class TextPart(Body):
    """Text of a message."""

    ignored = {}
    types, types_rule = ("text",), "this service takes text and images (image_url) only"

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """Where an image is."""

    ignored = {}

    url: str = Field(description="data:image/png;base64, and the file, or an https URL of a host that is allowed.")
    detail: Literal["auto", "low", "high", "original"] | None = DETAIL_FIELD


class ImageUrlPart(ImageBody):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def image(self, path: str) -> ImagePart:
        return ImagePart(self.image_url.url, f"{path}.image_url.url")


_Part = Annotated[
    Annotated[TextPart, Tag("~text")] | Annotated[ImageUrlPart, Tag("~image_url")], by_type("text", "image_url")
]


class Message(Body):
    """One message of a conversation."""

    ignored = {
        **only_null("function_call", "refusal", "audio"),
        **any_value("provider_specific_fields"),  # where litellm keeps fields of answers that it does not know
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[Many[_Part]]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Many[MessageToolCall] | None = None
    reasoning_content: str | None = Field(None, description="For templates that show earlier reasoning.")

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_text(cls, given: Any) -> Any:
        has_calls_only = isinstance(given, dict) and given.get("content") is None and given.get("tool_calls")
        return {**given, "content": ""} if has_calls_only else given

    def plain(self, path: str, texts: JsonTexts) -> dict[str, Any]:
        """The message for chat templates. `path`: its field, for errors; `texts`: of the request. Raises ApiError."""
        calls = []
        for index, one in enumerate(self.tool_calls or ()):
            param = f"{path}.tool_calls[{index}].function.arguments"
            arguments = read_arguments(one.function.arguments, param, texts)
            calls.append(template_call(one.id, one.function.name, arguments))
        given: dict[str, Any] = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
            "reasoning_content": self.reasoning_content,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return {"role": self.role, "content": joined(self.content, f"{path}.content"), **given}


class TemplateFields(Body):
    """Fields of a chat for the chat template, besides messages and tools."""

    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    reasoning_effort: str | None = Field(None, description="none switches reasoning off, other levels on.")
    add_generation_prompt: bool | None = Field(None, description="End with where the answer begins; true by default.")
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message's text.")

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """The conversation, without its wire format. Raises ApiError."""
        given = check_options(self.chat_template_kwargs or {}, "chat_template_kwargs")
        effort = {} if self.reasoning_effort is None else effort_options(self.reasoning_effort, "reasoning_effort")
        texts = JsonTexts()
        chat = Chat(
            [message.plain(f"messages[{index}]", texts) for index, message in enumerate(messages)],
            options={**effort, **given},  # the client's own override those of the effort
            wishes={"reasoning_effort": ""} if self.reasoning_effort not in (None, "none") else {},
            add_generation_prompt=self.add_generation_prompt is not False,
            is_open=bool(self.continue_final_message),
        )
        if chat.is_open and self.add_generation_prompt:
            raise bad_request("continue_final_message needs add_generation_prompt to be false", "add_generation_prompt")
        return Prompt(chat, "messages")


class JsonSchema(Body):
    """A JSON schema and its name."""

    name: str = Field(description="Not used.")
    description: str | None = Field(None, description="Not used.")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description=STRICT)


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self) -> AnswerForm | None:
        """None: any text. Raises ApiError if type and schema do not match."""
        path, given = "response_format.json_schema", self.json_schema
        if self.type == "json_schema":
            if given is None:
                raise bad_request(f"{path} is missing, which the type json_schema needs", path, "missing_field")
            return AnswerForm("json_schema", given.schema_, f"{path}.schema", bool(given.strict))
        if given is not None:
            raise bad_request(f"{path} needs the type json_schema", path)
        return None if self.type == "text" else AnswerForm("json_object", None, "response_format")


class StructuredOutputs(Body):
    """vLLM's way to ask for any form: exactly one of the fields."""

    regex: str | None = None
    grammar: str | None = Field(None, description="EBNF with the start rule root.")
    choice: Texts | None = None
    json_: Any = Field(None, alias="json", description="A JSON schema, as an object or as text.")

    def form(self) -> AnswerForm:
        """The form. Raises ApiError unless exactly one is given."""
        possible = (
            AnswerForm("regex", self.regex, "structured_outputs.regex"),
            AnswerForm("grammar", self.grammar, "structured_outputs.grammar"),
            AnswerForm("choice", self.choice, "structured_outputs.choice"),
            AnswerForm("json_schema", self.json_, "structured_outputs.json"),
        )
        forms = [form for form in possible if form.value is not None]
        if len(forms) != 1:
            message = f"structured_outputs has {len(forms)} forms; give exactly one of regex, grammar, choice and json"
            raise bad_request(message, "structured_outputs")
        return forms[0]
