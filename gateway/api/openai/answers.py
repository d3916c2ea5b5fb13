"""OpenAI's wire format of chunks and whole answers, for chats and completions. Must not know HTTP."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.answer.choice_text import Ending
from gateway.answer.choices import Totals, timing_fields
from gateway.api.openai.logprobs import ChatLogprobs, TextLogprobs
from gateway.tools.parse import Arguments, CallBegin, CallEvent
from runtime.hardware import OWN_VERSION
from wire.timing import Timing

SYSTEM_FINGERPRINT = f"baton-{OWN_VERSION}"


class PromptDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Details of the answer's tokens."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET  # if the model reasons


class TimingBody(msgspec.Struct):
    """Where one choice's time went, in seconds; see wire.timing.Timing."""

    queue_seconds: float
    grammar_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    transfer_bytes: int
    transport: str
    first_step_seconds: float
    decode_seconds: float
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    attempts: int
    prefill_reason: str


class FunctionBody(msgspec.Struct):
    """The called function and its arguments."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct):
    """A whole call."""

    id: str
    function: FunctionBody
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct):
    """What a chunk adds to a call's function."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """What a chunk adds to a call. The first of each call has its id, type and function's name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """The whole answer to a chat."""

    content: str | None  # null if there are calls and no text
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # if the answer has reasoning


class ChunkChoice(msgspec.Struct):
    """What a chunk adds to one choice of a chat."""

    index: int
    delta: Delta
    finish_reason: Ending | None = None
    logprobs: ChatLogprobs | None = None
    timing: TimingBody | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET  # as in ChatChoice; comes with the finish reason
    token_ids: Sequence[int] | UnsetType = UNSET  # since the last chunk, if requested


class ChatChoice(msgspec.Struct):
    """One whole choice of a chat."""

    index: int
    message: AssistantMessage
    finish_reason: Ending | None
    logprobs: ChatLogprobs | None = None
    timing: TimingBody | UnsetType = UNSET
    stop_reason: str | int | None = None  # the request's stop string or token id that ended it
    token_ids: Sequence[int] | UnsetType = UNSET  # if requested


class TextChoice(msgspec.Struct):
    """One choice of a completion, or what a chunk adds to it."""

    index: int
    text: str
    finish_reason: Ending | None = None
    logprobs: TextLogprobs | None = None
    timing: TimingBody | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET  # as in ChatChoice; comes with the finish reason
    token_ids: Sequence[int] | UnsetType = UNSET  # if requested
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # if requested, with the choice's first tokens
    prompt_logprobs: Sequence[msgspec.Raw] | UnsetType = UNSET  # if requested


Choice = ChunkChoice | ChatChoice | TextChoice
ObjectKind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Envelope(msgspec.Struct):
    """A chunk or a whole answer."""

    id: str
    object: ObjectKind
    created: int
    model: str
    choices: Sequence[Choice | msgspec.Raw]
    usage: Usage | UnsetType | None = UNSET  # null in the chunks before a stream's last, if that has it
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # of a chat, if requested; streams: in the first chunk
    prompt_logprobs: Sequence[msgspec.Raw] | UnsetType = UNSET  # of a chat, if requested


class ModelCard(msgspec.Struct):
    """A model served."""

    id: str
    created: int
    max_model_len: int
    root: str  # the base model, as in vLLM
    object: str = "model"
    owned_by: str = "baton"


class ModelList(msgspec.Struct):
    """All models served."""

    data: list[ModelCard]
    object: str = "list"


def call_deltas(events: Iterable[CallEvent]) -> list[ToolCallDelta]:
    """One per chunk."""
    deltas = []
    for event in events:
        if isinstance(event, CallBegin):
            deltas.append(ToolCallDelta(event.index, FunctionDelta("", event.name), event.id, "function"))
        elif isinstance(event, Arguments):
            deltas.append(ToolCallDelta(event.index, FunctionDelta(event.text)))
    return deltas


def usage_of(totals: Totals) -> Usage:
    num_prompt, num_completion = totals.num_prompt, totals.num_completion
    details = CompletionDetails(totals.num_reasoning) if totals.job.reasoning else UNSET
    return Usage(num_prompt, num_completion, num_prompt + num_completion, PromptDetails(totals.num_cached), details)


def timing_of(timing: Timing) -> TimingBody:
    return TimingBody(**timing_fields(timing, TimingBody.__struct_fields__))
