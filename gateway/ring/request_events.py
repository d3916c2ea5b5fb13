"""What can happen to a request: the input of its machine (request_machine.py). Pure values.

Who waits for places, and who speaks to the workers, turns what it sees into one of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.errors import ApiError
from wire.logprobs import TokenLogprobs
from wire.timing import Timing

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Placed:
    """The request has places on workers of these incarnations; none for prefill when decode prefills by itself."""

    decode: str
    prefill: str | None
    local_prefill_max_tokens: int  # as in policy.Placement


@dataclass(frozen=True, slots=True)
class Unplaced:
    """The queue is full, nobody can serve, or no place got free in time."""

    error: ApiError


@dataclass(frozen=True, slots=True)
class Reserved:
    """The session is open."""

    needs_prefill: bool
    num_cached: int = 0  # tokens of the prompt whose KV the decode worker has


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker has no room for the attempt, cannot ever serve such a request, is not there to be asked, or failed.

    "compiling": the grammar is not there yet.
    """

    role: Role
    why: Literal["no room", "compiling", "invalid", "absent", "failed"]
    detail: str
    is_grammar: bool = False  # with "invalid": the grammar is at fault


@dataclass(frozen=True, slots=True)
class Prefilled:
    """All KV was handed over: the prefill worker is done with the attempt."""

    timing: Timing = field(default_factory=Timing)  # the prefill worker's part
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of all prompt tokens but the first, when asked for


@dataclass(frozen=True, slots=True)
class News:
    """What a session's worker says of it, as in SessionDelta."""

    attempt: int
    token_ids: Sequence[int]
    finish_reason: str = ""
    error: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the next prompt tokens, where decode computes the prompt
    timing: Timing = field(default_factory=Timing)  # the decode worker's part, with the last news


@dataclass(frozen=True, slots=True)
class Lost:
    """The session's worker, or the way to it, is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The request's time is over while it runs."""


Event = Placed | Unplaced | Reserved | Refused | Prefilled | News | Lost | TimedOut
