"""Request bodies of Anthropic's Messages API: names and types. gateway/request checks values. Must not know HTTP."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.http.body import (
    CACHE_SALT_FIELD,
    Body,
    FirstErrorOnly,
    Ignored,
    TextOr,
    Texts,
    any_value,
    by_type,
    given_sampling,
    joined,
    only_null,
    sampling_field,
)
from gateway.errors import bad_request
from gateway.request.raw import AnswerForm, Chat, Prompt, RawRequest
from gateway.request.rules import MAX_MESSAGES, MAX_STOP_STRINGS
from gateway.tools.history import template_call
from gateway.tools.request import MAX_TOOLS, Choice, NamedChoice, RawTools, Tool
from gateway.tools.template_options import switch_options

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


_TextOrBlocks = TextOr[Annotated[list[TextBlock], FirstErrorOnly()]]


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
    content: _TextOrBlocks | None = None
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


class MessageParam(Body):
    """One message of a conversation."""

    ignored = {}

    role: Literal["user", "assistant"]
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
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock) and self.role == "assistant":
                reasoning.append(block.thinking)
            elif isinstance(block, ToolUseBlock) and self.role == "assistant":
                calls.append(block.plain(block_path))
            elif isinstance(block, ToolResultBlock) and self.role == "user":
                if texts:
                    raise bad_request(f"{block_path}: results of calls come before text", block_path)
                results.append(block.plain())
            elif not (isinstance(block, RedactedThinkingBlock) and self.role == "assistant"):
                raise bad_request(
                    f"{block_path}.type is {block.type!r}, which the role {self.role!r} cannot have",
                    f"{block_path}.type",
                )
        if results and not texts:
            return results
        said: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
        said |= {"tool_calls": calls} if calls else {}
        return [*results, said | ({"reasoning_content": "".join(reasoning)} if reasoning else {})]


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

    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


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


class OutputFormat(Body):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the answer must match."""

    ignored = {"effort": ("high",)}

    format: OutputFormat | None = None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    ignored = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Not enforced; max_tokens bounds reasoning and answer.")


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens; null means not given."""

    ignored = {
        **any_value("cache_control", "metadata"),
        **only_null("container", "context_management", "inference_geo", "user_profile_id"),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
    }

    model: str
    messages: Annotated[list[MessageParam], FirstErrorOnly()] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _TextOrBlocks | None = None
    tools: Annotated[list[MessagesTool], FirstErrorOnly()] | None = Field(
        None, json_schema_extra={"maxItems": MAX_TOOLS}
    )
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None

    def raw(self) -> RawRequest:
        """The request without its wire format. Raises ApiError."""
        system = [] if self.system is None else [{"role": "system", "content": joined(self.system)}]
        said = [plain for index, message in enumerate(self.messages) for plain in message.plain(f"messages[{index}]")]
        results = [
            f"messages[{index}].content[{rank}].tool_use_id"
            for index, message in enumerate(self.messages)
            for rank, block in enumerate(message.content)
            if isinstance(block, ToolResultBlock)
        ]
        is_thinking = None if self.thinking is None else self.thinking.type != "disabled"
        chat = Chat(
            [*system, *said],
            results,
            "messages",
            options={} if is_thinking is None else switch_options(is_thinking),
            reasoning_param="thinking" if is_thinking else None,
            is_open=said[-1]["role"] == "assistant",  # the answer continues it
        )
        choice = self.tool_choice
        tools = RawTools(
            [tool.tool() for tool in self.tools or ()],
            "tools[{}]",
            "input_schema",
            choice.choice() if choice else None,
            False if choice and choice.disable_parallel_tool_use else None,
        )
        return RawRequest(self.model, [Prompt(chat, "messages")], "messages", tools=tools)


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages; null means not given."""

    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    stream: bool | None = None
    stop_sequences: Texts | None = Field(None, json_schema_extra={"maxItems": MAX_STOP_STRINGS})
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = Field(None, json_schema_extra={"minimum": -1})
    cache_salt: str | None = CACHE_SALT_FIELD

    def raw(self) -> RawRequest:
        form = self.output_config.format if self.output_config else None
        return replace(
            super().raw(),
            max_tokens=self.max_tokens,
            sampling=given_sampling(self),
            cache_salt=self.cache_salt or "",
            stop=self.stop_sequences or (),
            stop_param="stop_sequences",
            form=AnswerForm("json_schema", form.schema_, "output_config.format.schema") if form else None,
        )
