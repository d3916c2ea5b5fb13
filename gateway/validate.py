"""The one set of rules for what a generation may ask, the same for REST and gRPC.

Pure: from a raw request and the model's limits to checked values or an ApiError naming the field. Must not know HTTP,
gRPC, text encoding or who generates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.errors import ApiError, bad_request, model_not_found
from gateway.generation import Sampling
from gateway.text.checkpoint import SamplingDefaults

Number = TypeVar("Number", int, float)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of one stop string
MAX_STOP_TOKEN_IDS = 256
MAX_TEMPERATURE = 2.0
TEXT_BYTES_PER_TOKEN = 16  # four times what English needs; longer text cannot fit the context and is not tokenised


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: the `role`, `content` and perhaps `name` and `tool_call_id` of each message."""

    messages: Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class RawRequest:
    """What a client asked, types right and values unchecked. None: not given."""

    model: str | None
    prompt: str | Sequence[int] | Chat
    prompt_param: str  # what the client calls its prompt, for errors
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


def check_model(model: str | None, served: str) -> None:
    """None asks for whatever is served."""
    if model is not None and model != served:
        raise model_not_found(model[:200], served)


def check_sampling(raw: RawRequest, defaults: SamplingDefaults, vocabulary_size: int, random_seed: int) -> Sampling:
    """Sampling parameters with the defaults filled in; `random_seed` serves requests without a seed."""
    top_k = _pick(raw.top_k, defaults.top_k)
    if top_k < 0:
        raise bad_request(f"top_k is {top_k}; it must be at least 0, which keeps all tokens", "top_k")
    return Sampling(
        temperature=_in_range("temperature", _pick(raw.temperature, defaults.temperature), MAX_TEMPERATURE),
        top_p=_positive("top_p", _in_range("top_p", _pick(raw.top_p, defaults.top_p), 1.0)),
        top_k=top_k if top_k < vocabulary_size else 0,
        min_p=_in_range("min_p", _pick(raw.min_p, defaults.min_p), 1.0),
        seed=random_seed if raw.seed is None else _unsigned(raw.seed),
    )


def check_stops(raw: RawRequest) -> tuple[str, ...]:
    """The stop strings."""
    if len(raw.stop) > MAX_STOP_STRINGS:
        raise bad_request(f"stop has {len(raw.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    for stop in raw.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise bad_request(
                f"a stop string has {len(stop)} characters; it must have between 1 and {MAX_STOP_CHARS}", "stop"
            )
    return tuple(raw.stop)


def check_stop_ids(raw: RawRequest, eos_token_ids: frozenset[int], vocabulary_size: int) -> frozenset[int]:
    """The token ids that end the answer: the request's and, unless `ignore_eos`, the model's own."""
    if len(raw.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise bad_request(
            f"stop_token_ids has {len(raw.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed",
            "stop_token_ids",
        )
    check_vocabulary(raw.stop_token_ids, "stop_token_ids", vocabulary_size)
    own = frozenset[int]() if raw.ignore_eos else eos_token_ids
    return own | frozenset(raw.stop_token_ids)


def check_vocabulary(ids: Sequence[int], param: str, vocabulary_size: int) -> None:
    """Every id names a token of the model."""
    if not ids:
        return
    for worst in (min(ids), max(ids)):
        if not 0 <= worst < vocabulary_size:
            raise bad_request(
                f"{param} holds token id {_shown(worst)}; the model's ids go from 0 to {vocabulary_size - 1}", param
            )


def check_text_bytes(num_bytes: int, param: str, context_tokens: int) -> None:
    """Refuses text that cannot fit the context before any work is spent on it."""
    limit = TEXT_BYTES_PER_TOKEN * context_tokens
    if num_bytes > limit:
        raise _too_long(f"{param} has {num_bytes} bytes of text; at most {limit} are read for this model", param)


def check_prompt_tokens(num_prompt: int, param: str, context_tokens: int) -> None:
    """A prompt has a token and leaves room for one more."""
    if num_prompt < 1:
        raise bad_request(f"{param} is empty; it must have at least one token", param)
    if num_prompt >= context_tokens:
        raise _too_long(
            f"{param} has {num_prompt} tokens; the model's context is {context_tokens} tokens and the answer needs "
            f"at least one, so shorten it to {context_tokens - 1} or fewer",
            param,
        )


def check_max_tokens(raw: RawRequest) -> None:
    """What can be said of max_tokens before the prompt is counted."""
    if raw.max_tokens is not None and raw.max_tokens < 1:
        raise bad_request(
            f"{raw.max_tokens_param} is {_shown(raw.max_tokens)}; it must be at least 1", raw.max_tokens_param
        )


def resolve_max_tokens(raw: RawRequest, num_prompt: int, context_tokens: int) -> int:
    """Most tokens to generate: as asked, or the rest of the context."""
    rest = context_tokens - num_prompt
    if raw.max_tokens is not None and raw.max_tokens > rest:
        raise _too_long(
            f"{raw.max_tokens_param} is {_shown(raw.max_tokens)}, but the prompt's {num_prompt} tokens leave {rest} of "
            f"the model's context of {context_tokens}; ask for {rest} or fewer",
            raw.max_tokens_param,
        )
    return rest if raw.max_tokens is None else raw.max_tokens


def _pick(given: Number | None, default: Number) -> Number:
    return default if given is None else given


def _in_range(name: str, value: float, highest: float) -> float:
    if not math.isfinite(value) or not 0 <= value <= highest:
        raise bad_request(f"{name} is {_shown(value)}; it must be a number from 0 to {highest:g}", name)
    return float(value)


def _positive(name: str, value: float) -> float:
    if value <= 0:
        raise bad_request(f"{name} is {value:g}; it must be above 0", name)
    return value


def _unsigned(seed: int) -> int:
    if not -(2**63) <= seed < 2**64:
        raise bad_request(f"seed is {_shown(seed)}; it must fit 64 bits", "seed")
    return seed % 2**64


def _shown(number: float) -> str:
    """A number as the client wrote it, unless it is long."""
    text = f"{number:g}" if isinstance(number, float) else str(number)
    return text if len(text) <= 40 else f"a number of {len(text)} digits"


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param, "context_length_exceeded")
