"""Request bodies of Anthropic's Messages API."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, Literal

from pydantic import ConfigDict, Field

from gateway.api.anthropic.chat_types import (
    AnyTool,
    Markable,
    MessageParam,
    MessagesTool,
    MessagesToolChoice,
    TextBlock,
    ToolResultBlock,
    find_marks,
)
from gateway.api.http.body import (
    CACHE_SALT_FIELD,
    SESSION_FIELD,
    Body,
    Many,
    OrderFields,
    TextOr,
    Texts,
    WordOr,
    given_sampling,
    only_null,
    sampling_field,
)
from gateway.request.rules import MAX_MESSAGES, MAX_STOP_STRINGS
from gateway.request.types import AnswerForm, Chat, GenerateRequest, Prompt
from gateway.tools.history import Message, keep_reasoning
from gateway.tools.request import MAX_TOOLS, RawTools
from gateway.tools.template_options import Option, check_effort, switch_options

# First line of a system's text that changes from request to request, so that no prefix would stay equal
_HEADER = re.compile(r"\Ax-anthropic-billing-header: [^\n]*(\n|$)")


class OutputFormat(Body):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form that the answer must have, and how much work it is worth."""

    ignored = {}

    effort: str | None = Field(None, description="For templates that read reasoning_effort.")
    format: OutputFormat | None = None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    ignored = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="adaptive: as the model does by itself.")
    budget_tokens: int | None = Field(None, description="Most tokens to reason; then the answer follows.")


class ThinkingTurns(Body):
    """The number of last messages that keep their reasoning."""

    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class ClearThinking(Body):
    """Removes the reasoning of earlier messages."""

    ignored = {}
    types = ("clear_thinking_20251015",)
    types_rule = "this service clears only reasoning, with clear_thinking_20251015"

    type: Literal["clear_thinking_20251015"]
    keep: WordOr[Literal["all"], ThinkingTurns] | None = Field(
        None, description="By default the last message that reasons."
    )

    def warnings(self, path: str = "") -> Iterator[str]:
        if self.keep == "all":
            yield f"{path.removesuffix('.')} clears nothing and has no effect here"


class ContextManagement(Body):
    """The parts of a conversation that are removed before it is answered."""

    ignored = {}

    edits: Many[ClearThinking] | None = None


class Metadata(Body):
    """The user whose request it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    user_id: str | None = SESSION_FIELD


class CountTokensRequest(Markable):
    """Body of POST /v1/messages/count_tokens; null means not given."""

    ignored = {
        **only_null("container", "inference_geo", "user_profile_id"),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
    }

    model: str
    messages: Many[MessageParam] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextOr[Many[TextBlock]] | None = None
    tools: Many[AnyTool] | None = Field(None, json_schema_extra={"maxItems": MAX_TOOLS})
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None
    metadata: Metadata | None = None

    def raw(self) -> GenerateRequest:
        """The request without its wire format. Raises ApiError."""
        blocks = self.system or []
        texts = [blocks] if isinstance(blocks, str) else [block.text for block in blocks]
        begin, num_headers = _HEADER.subn("", texts[0] if texts else "")
        text = "".join([begin, *texts[1:]])
        has_system = self.system is not None and (text or not num_headers)
        turns = [message.plain(f"messages[{index}]") for index, message in enumerate(self.messages)]
        said: Sequence[Message] = list(chain.from_iterable(turns))
        num_before = int(bool(has_system))  # messages before the first turn
        ends = accumulate(map(len, turns), initial=num_before)
        marks = find_marks(self._list_parts(num_before, list(ends)[1:]))
        results = [
            f"messages[{index}].content[{rank}].tool_use_id"
            for index, message in enumerate(self.messages)
            for rank, block in enumerate(message.content)
            if isinstance(block, ToolResultBlock)
        ]
        for edit in (self.context_management and self.context_management.edits) or ():
            if edit.keep != "all":
                said = keep_reasoning(said, edit.keep.value if edit.keep else 1)
        effort = self.output_config.effort if self.output_config else None
        thinking = self.thinking.type if self.thinking else None
        options: dict[str, Option] = {}
        wishes = {"thinking": ""} if thinking == "adaptive" else {}
        if thinking in ("enabled", "disabled"):
            options |= switch_options(thinking == "enabled")
        if effort is not None:
            options["reasoning_effort"] = check_effort(effort, "output_config.effort")
            wishes["output_config.effort"] = "reasoning_effort"
        chat = Chat(
            [*([{"role": "system", "content": text}] if has_system else []), *said],
            results,
            "messages",
            options,
            reasoning_param="thinking" if thinking == "enabled" else None,
            wishes=wishes,
            is_open=said[-1]["role"] == "assistant",  # the answer continues it
            marks=marks,
        )
        given = enumerate(self.tools or ())
        tools = [tool.tool(f"tools[{index}]") for index, tool in given if isinstance(tool, MessagesTool)]
        choice = self.tool_choice.choice() if self.tool_choice else None
        if choice == "auto" and self.tools and not tools:
            choice = None  # all are left out
        is_single = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return GenerateRequest(
            self.model,
            [Prompt(chat, "messages")],
            "messages",
            max_reasoning_tokens=self.thinking.budget_tokens if self.thinking else None,
            max_reasoning_param="thinking.budget_tokens",
            tools=RawTools(tools, choice, False if is_single else None),
            session=(self.metadata and self.metadata.user_id) or "",
            session_param="metadata.user_id",
            warnings=(*self.warnings(), *["x-anthropic-billing-header is left out of the prompt"] * num_headers),
        )

    def _list_parts(self, num_before: int, ends: Sequence[int]) -> Iterator[tuple[int, Body]]:
        """Yields each part that can be marked, with the number of messages up to its end. `ends`: those of turns."""
        system = [] if self.system is None or isinstance(self.system, str) else self.system
        yield from ((num_before, part) for part in (*(self.tools or ()), *system))
        for end, message in zip(ends, self.messages, strict=True):
            for block in message.content if not isinstance(message.content, str) else ():
                inner = block.content if isinstance(block, ToolResultBlock) else None
                yield from ((end, part) for part in (block, *(inner if isinstance(inner, list) else ())))
        yield ends[-1], self


class MessagesRequest(CountTokensRequest, OrderFields):
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
            **self.order(),
            stop=self.stop_sequences or (),
            stop_param="stop_sequences",
            form=AnswerForm("json_schema", form.schema_, "output_config.format.schema") if form else None,
        )
