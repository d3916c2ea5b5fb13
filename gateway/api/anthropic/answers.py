"""Answers of Anthropic's Messages API: types. Must not know HTTP or where text comes from."""

from typing import Literal

import msgspec

from gateway.api.http.json_answer import Tagged

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBody(Tagged, tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBody(Tagged, tag="thinking"):
    """The reasoning part of the answer."""

    thinking: str
    signature: str = ""  # nothing is signed


class ToolUseBody(Tagged, tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: msgspec.Raw  # a JSON object


class MessageUsage(msgspec.Struct):
    """Token counts. The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageBody(Tagged, tag="message"):
    """The whole answer, or its fields known at the start."""

    id: str
    model: str
    content: list[TextBody | ThinkingBody | ToolUseBody]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class CountAnswer(msgspec.Struct):
    """The answer of count_tokens."""

    input_tokens: int
