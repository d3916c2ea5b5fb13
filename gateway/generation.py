"""One request after validation, and the tokens that come back: the border between text and the ring.

Knows token ids only. Above it lie REST, gRPC and text; below it the dispatcher.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; complete, with defaults already filled in."""

    temperature: float  # 0 is greedy
    top_p: float  # in (0, 1]
    top_k: int  # 0 keeps all
    min_p: float  # in [0, 1]
    seed: int  # unsigned 64 bit


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate. Set by the validator, read by the dispatcher."""

    request_id: str
    prompt_ids: tuple[int, ...]  # at least one
    max_tokens: int  # at least one; prompt and answer fit the context
    sampling: Sampling
    stop_token_ids: frozenset[int]  # the model's own (unless ignore_eos) and the request's


@dataclass(frozen=True, slots=True)
class Tokens:
    """News of one generation."""

    token_ids: tuple[int, ...]  # new tokens in order, a final stop token included; may be empty at the end
    finish_reason: FinishReason | None  # set exactly once, on the last news


class Ring(Protocol):
    """Everything below the text."""

    def generate(self, generation: Generation) -> AsyncIterator[Tokens]:
        """Stream one generation. Closing the iterator (aclose) ends the work everywhere and frees its pages.

        Raises errors.ApiError: 429 when the queue is full, 503 when nobody can serve.
        """
        ...

    def check_ready(self) -> str | None:
        """Why the service cannot serve now; None when it can."""
        ...
