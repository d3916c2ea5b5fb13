"""One request after validation, and the tokens that come back: the border between text and the ring.

Knows token ids only. Above it lie REST, gRPC and text; below it the dispatcher.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]
Drafter = Literal["auto", "off", "ngram", "draft"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; complete, with defaults already filled in."""

    temperature: float  # 0 is greedy
    top_p: float  # in (0, 1]
    top_k: int  # 0 keeps all
    min_p: float  # in [0, 1]
    seed: int  # unsigned 64 bit
    frequency_penalty: float = 0.0  # 0 is off
    presence_penalty: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what to add), ids in the vocabulary, each once


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole answer must match. Compiled, and perhaps refused, by the decode worker."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str  # empty for json_object
    param: str  # the request's field it comes from, for errors


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are guessed ahead. Never changes them."""

    drafter: Drafter = "auto"
    max_draft_tokens: int = 0  # 0 leaves it to the worker


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate: one answer. Set by the validator, read by the dispatcher."""

    request_id: str
    prompt_ids: tuple[int, ...]  # at least one
    max_tokens: int  # at least one; prompt and answer fit the context
    sampling: Sampling
    stop_token_ids: frozenset[int]  # the model's own (unless ignore_eos) and the request's
    min_tokens: int = 0  # before a stop token may come; at most max_tokens
    num_logprobs: int | None = None  # log-probabilities of the tokens, and of so many most likely ones; None: none
    num_prompt_logprobs: int | None = None  # the same of the prompt's tokens
    grammar: Grammar | None = None
    speculation: Speculation = Speculation()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution: before penalties, filters, temperature."""

    logprob: float  # of the token that stands there
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class Timing:
    """Where one generation's time went. Seconds of the last attempt, except the queue's, which add up."""

    queue_s: float = 0.0
    prefill_s: float = 0.0  # the wait for its turn included
    transfer_s: float = 0.0  # reads by the decode worker; overlaps with prefill
    transfer_bytes: int = 0
    transport: str = ""  # "shm" or "grpc"; empty when nothing was transferred
    first_step_s: float = 0.0  # from complete KV to the first token
    decode_s: float = 0.0  # from the first token to the last
    cached_tokens: int = 0  # prompt tokens whose KV was there already
    draft_tokens: int = 0  # guessed ahead
    accepted_tokens: int = 0  # of those
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """News of one generation."""

    token_ids: tuple[int, ...]  # new tokens in order, a final stop token included; may be empty at the end
    finish_reason: FinishReason | None  # set exactly once, on the last news
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    # of prompt_ids[1:], once, with the first news, when asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # with the first news, as far as it is known (a stop string may end the rest unseen), and with the last, in full
    timing: Timing | None = None


class SharedPrompt:
    """Ties the generations of one prompt together: those placed beside the first take over its KV.

    One object per prompt, handed to every `Ring.generate` of it. Opaque above the ring, which keeps its state in it.
    """

    def __init__(self, num_choices: int = 1) -> None:
        """`num_choices`: generations that will be asked for. The queue takes all of them with the first, or none."""
        self.num_choices = num_choices
        self.leader: object | None = None  # set and read by the ring only


class Ring(Protocol):
    """Everything below the text."""

    def generate(self, generation: Generation, shared: SharedPrompt | None = None) -> AsyncIterator[Tokens]:
        """Stream one generation. Closing the iterator (aclose) ends the work everywhere and frees its pages.

        `shared`: the same for all generations of one prompt; their prompt_ids are equal.
        Raises errors.ApiError: 400 when no worker can take it, 429 when the queue is full, 503 when nobody can serve,
        504 when its time is over.
        """
        ...

    def check_ready(self) -> str | None:
        """Why the service cannot serve now; None when it can."""
        ...
