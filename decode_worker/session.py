"""A session of a decode worker: one reservation, its tokens and its pages. Pure values; session_table.py changes them.

One session's life, and what frees its pages:

    reserve ──► RECEIVING ──all KV here──► ACTIVE ──last token──► gone
                    │  ▲                   │  ▲
                    │  └ offers, one read  │  └ resume, when pages are free
                    │    at a time         └► PREEMPTED (holds no page; its KV is computed again)
                    └─ abort, lease end, error: from every phase ──► ENDED ──► gone

ENDED lasts while a copy or an engine step still touches the pages; they are freed when both are over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine.sampling import SamplingParams


class Phase(Enum):
    RECEIVING = "receiving"
    ACTIVE = "active"
    PREEMPTED = "preempted"
    ENDED = "ended"


class OfferRefusedError(Exception):
    """An offer that the session does not want. `reason` is one word, as in OfferResponse.reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a gateway asks for."""

    request_id: str
    attempt: int
    gateway: str
    handle: int
    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    local_prefill_max_tokens: int


@dataclass(slots=True)
class Session:
    """One reservation. Changed only by SessionTable."""

    id: int
    request_id: str
    attempt: int
    gateway: str
    handle: int  # what the gateway calls it
    tokens: list[int]  # prompt, then what was generated
    num_prompt: int
    max_total: int  # most tokens, prompt included
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    pages: list[int]
    phase: Phase
    deadline: float  # end of the lease while RECEIVING, renewed by every accepted offer
    computed: int = 0  # KV of positions [0, computed) is in `pages`
    is_read: bool = False  # a copy into `pages` is under way
    is_stepped: bool = False  # an engine step works on `pages`

    @property
    def num_missing(self) -> int:
        """Positions without KV. The last token always is one: its step gives the next token."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one session for its gateway."""

    gateway: str
    handle: int
    attempt: int
    token_ids: tuple[int, ...]
    finish_reason: str = ""  # at the end "stop", "length", "error", or "expired" when no KV came
    error: str = ""
