"""Request bodies of Anthropic's Messages API: names and types. gateway/request checks values. Must not know HTTP."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.http.body import (
    CACHE_SALT_FIELD,
    Body,
    FirstErrorOnly,
    LeftOutTool,
    TextOr,
    Texts,
    any_value,
    by_type,
    given_sampling,
    joined,
    only_null,
    sampling_field,
    tool_type,
)
from gateway.errors import bad_request
from gateway.request.left_out import Ignored, split_header
from gateway.request.raw import AnswerForm, Chat, Prompt, RawRequest
from gateway.request.rules import MAX_MESSAGES, MAX_STOP_STRINGS
from gateway.tools.history import Message, keep_reasoning, template_call
from gateway.tools.request import MAX_TOOLS, Choice, NamedChoice, RawTools, Tool
from gateway.tools.template_options import Option, check_effort, switch_options

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
_ROLES: Mapping[type[Body], str] = {  # block |-> the only role that can have it; text has every role
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
}


class MessageParam(Body):
    """One message of a conversation."""

    ignored = {}

    role: Literal["user", "assistant", "system"]
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
            if _ROLES.get(type(block), self.role) != self.role:
                raise bad_request(
                    f"{block_path}.type is {block.type!r}, which the role {self.role!r} cannot have",
                    f"{block_path}.type",
                )
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    reasoning.append(block.thinking)
                case ToolUseBlock():
                    calls.append(block.plain(block_path))
                case ToolResultBlock():
                    if texts:
                        raise bad_request(f"{block_path}: results of calls come before text", block_path)
                    results.append(block.plain())
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

    def tool(self, path: str) -> Tool:
        """`path`: its field, for errors."""
        return Tool(self.name, self.description, self.input_schema, bool(self.strict), path, f"{path}.input_schema")


_Tool = Annotated[
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


class OutputFormat(Body):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the answer must match, and how much work it is worth."""

    ignored = {}

    effort: str | None = Field(None, description="For templates that read reasoning_effort.")
    format: OutputFormat | None = None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    ignored = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="adaptive: as the model does by itself.")
    budget_tokens: int | None = Field(None, description="Not enforced; max_tokens bounds reasoning and answer.")

    def options(self) -> Mapping[str, Option]:
        """Variables for the template."""
        return {} if self.type == "adaptive" else switch_options(self.type == "enabled")


class ThinkingTurns(Body):
    """So many of the last messages that reason."""

    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class ClearThinking(Body):
    """Removes the reasoning of earlier messages."""

    ignored = {}
    types = ("clear_thinking_20251015",)
    types_rule = "this service clears only reasoning, with clear_thinking_20251015"

    type: Literal["clear_thinking_20251015"]
    keep: (
        Annotated[
            Annotated[Literal["all"], Tag("~word")] | Annotated[ThinkingTurns, Tag("~turns")],
            Discriminator(lambda value: "~word" if isinstance(value, str) else "~turns"),
        ]
        | None
    ) = Field(None, description="By default the last message that reasons.")

    def warnings(self, path: str = "") -> Iterator[str]:
        if self.keep == "all":
            yield f"{path.removesuffix('.')} clears nothing and has no effect here"

    def apply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages without the reasoning that is not kept."""
        if self.keep == "all":
            return messages
        return keep_reasoning(messages, self.keep.value if self.keep else 1)


class ContextManagement(Body):
    """What is removed from a conversation before it is answered."""

    ignored = {}

    edits: Annotated[list[ClearThinking], FirstErrorOnly()] | None = None


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens; null means not given."""

    ignored = {
        **any_value("cache_control", "metadata"),
        **only_null("container", "inference_geo", "user_profile_id"),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
    }

    model: str
    messages: Annotated[list[MessageParam], FirstErrorOnly()] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _TextOrBlocks | None = None
    tools: Annotated[list[_Tool], FirstErrorOnly()] | None = Field(None, json_schema_extra={"maxItems": MAX_TOOLS})
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None

    def raw(self) -> RawRequest:
        """The request without its wire format. Raises ApiError."""
        blocks = self.system or []
        texts = [blocks] if isinstance(blocks, str) else [block.text for block in blocks]
        header, text = split_header(texts)
        has_system = self.system is not None and (text or not header)
        system = [{"role": "system", "content": text}] if has_system else []
        said: Sequence[Message] = [
            plain for index, message in enumerate(self.messages) for plain in message.plain(f"messages[{index}]")
        ]
        results = [
            f"messages[{index}].content[{rank}].tool_use_id"
            for index, message in enumerate(self.messages)
            for rank, block in enumerate(message.content)
            if isinstance(block, ToolResultBlock)
        ]
        for edit in (self.context_management and self.context_management.edits) or ():
            said = edit.apply(said)
        effort = self.output_config.effort if self.output_config else None
        thinking = self.thinking.type if self.thinking else None
        chat = Chat(
            [*system, *said],
            results,
            "messages",
            options={
                **(self.thinking.options() if self.thinking else {}),
                **({"reasoning_effort": check_effort(effort, "output_config.effort")} if effort is not None else {}),
            },
            reasoning_param="thinking" if thinking == "enabled" else None,
            wishes={
                **({"thinking": ""} if thinking == "adaptive" else {}),
                **({"output_config.effort": "reasoning_effort"} if effort is not None else {}),
            },
            header=header,
            is_open=said[-1]["role"] == "assistant",  # the answer continues it
        )
        tools = RawTools(self._tools(), self._choice(), self._is_parallel)
        prompt = Prompt(chat, "messages")
        return RawRequest(self.model, [prompt], "messages", tools=tools, warnings=tuple(self.warnings()))

    def _tools(self) -> list[Tool]:
        given = enumerate(self.tools or ())
        return [tool.tool(f"tools[{index}]") for index, tool in given if isinstance(tool, MessagesTool)]

    def _choice(self) -> Choice | NamedChoice | None:
        """None for "auto" where all tools are left out."""
        choice = self.tool_choice.choice() if self.tool_choice else None
        return None if choice == "auto" and self.tools and not self._tools() else choice

    @property
    def _is_parallel(self) -> bool | None:
        return False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None


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
            is_max_tokens_clamped=True,
            sampling=given_sampling(self),
            cache_salt=self.cache_salt or "",
            stop=self.stop_sequences or (),
            stop_param="stop_sequences",
            form=AnswerForm("json_schema", form.schema_, "output_config.format.schema") if form else None,
        )
