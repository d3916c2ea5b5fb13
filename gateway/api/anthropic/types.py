"""Request bodies of Anthropic's Messages API: names and types. gateway/request checks values. Must not know HTTP."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.anthropic.message_types import MessageParam, TextOrBlocks, ToolResultBlock
from gateway.api.anthropic.tool_types import AnyTool, MessagesTool, MessagesToolChoice
from gateway.api.http.body import (
    CACHE_SALT_FIELD,
    Body,
    FirstErrorOnly,
    Texts,
    any_value,
    given_sampling,
    only_null,
    sampling_field,
)
from gateway.request.left_out import split_header
from gateway.request.rules import MAX_MESSAGES, MAX_STOP_STRINGS
from gateway.request.types import AnswerForm, Chat, GenerateRequest, Prompt
from gateway.tools.history import Message, keep_reasoning
from gateway.tools.request import MAX_TOOLS, Choice, NamedChoice, RawTools, Tool
from gateway.tools.template_options import Option, check_effort, switch_options


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
    system: TextOrBlocks | None = None
    tools: Annotated[list[AnyTool], FirstErrorOnly()] | None = Field(None, json_schema_extra={"maxItems": MAX_TOOLS})
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None

    def raw(self) -> GenerateRequest:
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
        return GenerateRequest(self.model, [prompt], "messages", tools=tools, warnings=tuple(self.warnings()))

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

    def raw(self) -> GenerateRequest:
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
