"""The decisions of one request's life, from the queue to its one end. Pure: events and `now` in, actions out.

    WAITING ──placed──► RESERVING ──reserved──► RUNNING ──last news──► ENDED
       ▲                    │                      │                     ▲
       └── no room after all, or failed: again ────┴── too often, too late, too much: `error`

Who leaves an attempt (`Leave`) lets go of all it holds: session, prefill, places. A client that leaves needs no
decision: its attempt is left, and that is all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from gateway.errors import ApiError, bad_request, not_ready, took_too_long
from gateway.generation import Generation, Tokens
from gateway.ring.policy import NO_LIMIT

MAX_ATTEMPTS = 3  # that failed in a row, none of them with a new token
MAX_LOSSES = 10  # the same when the last one ended because its worker was gone: mostly no fault of the request

Role = Literal["prefill", "decode"]


class Phase(Enum):
    WAITING = "waiting"
    RESERVING = "reserving"
    RUNNING = "running"
    ENDED = "ended"


# -- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """The request has places on workers of these incarnations; none for prefill when decode prefills by itself."""

    decode: str
    prefill: str | None


@dataclass(frozen=True, slots=True)
class Unplaced:
    """The queue is full, nobody can serve, or no place got free in time."""

    error: ApiError


@dataclass(frozen=True, slots=True)
class Reserved:
    """The session is open."""

    needs_prefill: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker has no room for the attempt, cannot ever serve such a request, is not there to be asked, or failed."""

    role: Role
    why: Literal["no room", "invalid", "absent", "failed"]
    detail: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """All KV was handed over: the prefill worker is done with the attempt."""


@dataclass(frozen=True, slots=True)
class News:
    """What a session's worker says of it, as in SequenceDelta."""

    attempt: int
    token_ids: Sequence[int]
    finish_reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The session's worker, or the way to it, is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The request's time is over while it runs."""


Event = Placed | Unplaced | Reserved | Refused | Prefilled | News | Lost | TimedOut


# -- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Open a session."""

    attempt: int
    prompt_ids: list[int]
    max_tokens: int
    local_prefill_max_tokens: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Have the prompt prefilled for the session."""

    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give back one place before the others; a worker that refused is full."""

    role: Role
    is_refused: bool


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens for the client."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Leave:
    """The attempt is over: abort what is left of its session and prefill, give back its places."""

    reason: str = ""  # empty after a whole answer
    is_failure: bool = False


Action = Reserve | Prefill | GiveBack | Emit | Leave


@dataclass(slots=True)
class Request:
    """One request and its attempts. Changed by `step` only."""

    generation: Generation
    deadline: float  # when it has taken too long
    local_prefill_max_tokens: int
    patience_s: float  # how long it looks for a worker that is there
    silent_since: float  # when its client last got tokens; at first, when it came
    phase: Phase = Phase.WAITING
    error: ApiError | None = None  # how it ended, if not with its answer
    attempt: int = 1
    num_failures: int = 0
    absent_since: float | None = None  # when it first found nobody, since a worker last took it
    emitted: list[int] = field(default_factory=list)  # with the client: never said again, never taken back
    avoid: set[str] = field(default_factory=set)  # incarnations to which failed attempts are blamed
    places: Placed = field(default=Placed("", None))  # of the present attempt

    @property
    def prompt_ids(self) -> list[int]:
        """What the present attempt starts from."""
        return [*self.generation.prompt_ids, *self.emitted]

    @property
    def num_missing(self) -> int:
        """Positions whose KV the present attempt needs before its first step."""
        return len(self.generation.prompt_ids) + len(self.emitted) - 1

    @property
    def num_left(self) -> int:
        """The most tokens that are still to come."""
        return self.generation.max_tokens - len(self.emitted)

    @property
    def is_retry(self) -> bool:
        return self.attempt > 1

    def step(self, event: Event, now: float) -> list[Action]:
        """What follows from `event`. Events of an earlier phase or attempt lead to nothing."""
        match self.phase, event:
            case Phase.WAITING, Placed():
                return self._reserve(event)
            case Phase.WAITING, Unplaced(error):
                return self._end(error)
            case Phase.RESERVING, Reserved(needs_prefill):
                return self._run(needs_prefill)
            case Phase.RESERVING | Phase.RUNNING, Refused():
                return self._take_refusal(event, now)
            case Phase.RUNNING, Prefilled():
                return [GiveBack("prefill", is_refused=False)]
            case Phase.RUNNING, News(attempt=self.attempt):
                return self._take_news(event, now)
            case Phase.RESERVING | Phase.RUNNING, Lost(reason):
                return self._fail(reason, self.places.decode, now, MAX_LOSSES)
            case Phase.RUNNING, TimedOut():
                return self._end(took_too_long(), Leave("out of time"))
        return []

    def _reserve(self, places: Placed) -> list[Action]:
        self.phase = Phase.RESERVING
        self.places = places
        local = self.local_prefill_max_tokens if places.prefill is not None else NO_LIMIT
        return [Reserve(self.attempt, self.prompt_ids, self.num_left, local)]

    def _run(self, needs_prefill: bool) -> list[Action]:
        self.phase = Phase.RUNNING
        self.absent_since = None
        if self.places.prefill is None:
            return []
        return [Prefill(self.prompt_ids) if needs_prefill else GiveBack("prefill", is_refused=False)]

    def _take_refusal(self, refused: Refused, now: float) -> list[Action]:
        if refused.why == "no room":
            return [GiveBack(refused.role, is_refused=True), *self._again(Leave(refused.detail))]
        if refused.why == "invalid" and not self.emitted:  # later it is no fault of the client's: another may do
            return self._end(bad_request(refused.detail, None), Leave(refused.detail))
        if refused.role == "prefill" and self.places.prefill is not None:  # in the end decode can do without
            return self._fail(refused.detail, self.places.prefill, now, MAX_LOSSES)
        if refused.why == "absent":
            return self._look_on(refused.detail, now)
        return self._fail(refused.detail, self.places.decode, now)

    def _look_on(self, reason: str, now: float) -> list[Action]:
        """Nobody was there: nothing was tried, so that only time counts."""
        self.avoid.add(self.places.decode)
        if self.absent_since is None:
            self.absent_since = now
        leave = Leave(reason)
        if now >= self.deadline:
            return self._end(took_too_long(), leave)
        if now - self.absent_since >= self.patience_s:
            return self._end(not_ready(f"found no worker for {self.patience_s:g} s; the last: {reason}"), leave)
        return self._again(leave)

    def _take_news(self, news: News, now: float) -> list[Action]:
        if news.finish_reason not in ("", "stop", "length"):
            late = self.places.prefill if news.finish_reason == "expired" else None
            return self._fail(news.error or news.finish_reason, late or self.places.decode, now)
        self.emitted.extend(news.token_ids)
        if news.token_ids:
            self.silent_since = now
            self.num_failures = 0  # workers that die one after the other are no fault of a request that gets on
        if not news.finish_reason:
            return [Emit(Tokens(tuple(news.token_ids), None))]
        reason: Literal["stop", "length"] = "stop" if news.finish_reason == "stop" else "length"
        return [Emit(Tokens(tuple(news.token_ids), reason)), *self._end(None, Leave())]

    def _fail(self, reason: str, culprit: str, now: float, limit: int = MAX_ATTEMPTS) -> list[Action]:
        self.num_failures += 1
        self.avoid.add(culprit)
        leave = Leave(reason, is_failure=True)
        if now >= self.deadline:
            return self._end(took_too_long(), leave)
        if self.num_failures >= limit:
            message = f"gave up after {self.num_failures} attempts; the last: {reason}"
            return self._end(ApiError(503, message, code="failed", retry_after_s=1), leave)
        return self._again(leave)

    def _again(self, leave: Leave) -> list[Action]:
        self.phase = Phase.WAITING
        self.attempt += 1
        return [leave]

    def _end(self, error: ApiError | None, *last: Leave) -> list[Action]:
        self.phase = Phase.ENDED
        self.error = error
        return list(last)
