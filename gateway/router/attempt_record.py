"""A record of what one attempt of a request did, and when: for traces. Pure.

queued ──► placed ──► kv ──► first_token ──► ended
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from wire.timing import Timing

Event = Literal["placed", "kv", "first_token"]  # kv: the prefill worker reported that the decode worker has all KV


class WorkerName(NamedTuple):
    """A worker, and its start: another start is another incarnation."""

    address: str
    incarnation: str


@dataclass(slots=True)
class AttemptRecord:
    """Filled in while the attempt runs. Times are of time.monotonic, when the gateway learned of it."""

    number: int  # from 1
    queued_s: float  # since when it waits for places
    events: dict[Event, float] = field(default_factory=dict)  # those that have happened |-> when
    ended_s: float | None = None  # None: not yet
    decode: WorkerName | None = None
    prefill: WorkerName | None = None  # where it computes what `decode` lacks of the prompt
    num_cached: int = 0  # prompt tokens whose KV was not computed for the attempt
    num_tokens: int = 0  # of the answer
    prefilled: Timing | None = None  # the prefill worker's part
    decoded: Timing | None = None  # the decode worker's part, of an answer that came to its end
    reason: str = ""  # why it ended without a whole answer
    is_failure: bool = False

    def place(self, decode: WorkerName, prefill: WorkerName | None, now: float) -> None:
        self.decode, self.prefill, self.events["placed"] = decode, prefill, now

    def reserve(self, needs_prefill: bool, num_cached: int) -> None:
        self.prefill, self.num_cached = self.prefill if needs_prefill else None, num_cached

    def finish_prefill(self, timing: Timing, now: float) -> None:
        self.prefilled, self.num_cached, self.events["kv"] = timing, timing.cached_tokens, now

    def add_tokens(self, num_tokens: int, timing: Timing | None, now: float) -> None:
        """`timing`: the decode worker's part, with the last tokens."""
        self.num_tokens += num_tokens
        self.decoded = timing
        if num_tokens:
            self.events.setdefault("first_token", now)

    def close(self, now: float, reason: str = "", is_failure: bool = False) -> None:
        """Note that it ended, or was left. Later calls change nothing."""
        if self.ended_s is None:
            self.ended_s, self.reason, self.is_failure = now, reason, is_failure
