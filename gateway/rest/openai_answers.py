"""The OpenAI wire format of answers, as bytes.

Knows chunks and whole answers, encoded by msgspec; must not know HTTP or who generates.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.errors import ApiError
from gateway.generation import FinishReason


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Delta(msgspec.Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """The whole answer to a chat."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChunkChoice(msgspec.Struct):
    """A chat chunk's only choice."""

    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class ChatChoice(msgspec.Struct):
    """A chat's only choice."""

    message: AssistantMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class TextChoice(msgspec.Struct):
    """A completion's or its chunk's only choice."""

    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


Choices = list[ChunkChoice] | list[ChatChoice] | list[TextChoice]
ObjectKind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Envelope(msgspec.Struct):
    """A chunk or a whole answer."""

    id: str
    object: ObjectKind
    created: int
    model: str
    choices: Choices
    usage: Usage | UnsetType | None = UNSET  # null in the chunks of a stream that will end with one


class ErrorBody(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """An error as OpenAI's clients expect it."""

    error: ErrorBody


class ModelCard(msgspec.Struct):
    """A model served."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "baton"


class ModelList(msgspec.Struct):
    """All models served."""

    data: list[ModelCard]
    object: str = "list"


_ERROR_TYPES = {  # HTTP status |-> OpenAI's word for it
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

_encoder = msgspec.json.Encoder()


def encode(answer: Envelope | ErrorEnvelope | ModelCard | ModelList) -> bytes:
    """JSON."""
    return _encoder.encode(answer)


def count_usage(num_prompt: int, num_tokens: int) -> Usage:
    """Token counts of one request."""
    return Usage(num_prompt, num_tokens, num_prompt + num_tokens)


def build_error(error: ApiError) -> ErrorEnvelope:
    """An error in OpenAI's nested form."""
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return ErrorEnvelope(ErrorBody(error.message, kind, error.param, error.code))
