"""Answers of OpenAI's Responses API: types."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.http.errors import Tagged
from gateway.tools.reasoning import Phase

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Tagged, tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: tuple[()] = ()
    logprobs: Sequence[msgspec.Raw] = ()  # TokenLogprob, if requested


class OutputMessage(Tagged, tag="message"):
    """An item of text."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    phase: Phase | UnsetType = UNSET  # where the model says so


class ReasoningText(Tagged, tag="reasoning_text"):
    """Reasoning before an answer."""

    text: str


class OutputReasoning(Tagged, tag="reasoning"):
    """An item of reasoning."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: tuple[()] = ()
    encrypted_content: None = None


class OutputCall(Tagged, tag="function_call"):
    """An item that calls a function."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomCall(Tagged, tag="custom_tool_call"):
    """An item that calls a custom tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Details of the answer's tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Failure(msgspec.Struct):
    """Why an answer failed."""

    code: str
    message: str


class InputTokens(msgspec.Struct):
    """How many tokens a request's prompt has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseBody(msgspec.Struct, kw_only=True):
    """The whole answer, or the part known so far."""

    # as requested
    instructions: str | None
    max_output_tokens: int | None
    metadata: Mapping[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: Mapping[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float

    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    usage: ResponseUsage | None = None  # at the end
    incomplete_details: Incomplete | None = None
    error: Failure | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"
    background: bool = False
    previous_response_id: str | None = None
    reasoning: None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    truncation: Literal["disabled"] = "disabled"
    user: None = None
