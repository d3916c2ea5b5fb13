"""What one attempt of a request did, and when: for traces. Pure.

    queued ──► placed ──► KV computed ──► KV complete on decode ──► ended
       queue     prefill       transfer             decode

Parts do not overlap. A transfer overlaps the computing of later chunks; its part is what remains after that.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from wire.timing import Timing

Part = Literal["queue", "prefill", "transfer", "decode"]


class WorkerName(NamedTuple):
    """Which worker, and since which start of it."""

    address: str
    incarnation: str


@dataclass(slots=True)
class AttemptRecord:
    """Filled in while the attempt runs. Times are of time.monotonic, when the gateway learned of it; None: not yet."""

    number: int  # from 1
    queued_s: float  # since when it waits for places
    placed_s: float | None = None
    reserved_s: float | None = None
    prefilled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    decode: WorkerName | None = None
    prefill: WorkerName | None = None
    is_handed_off: bool = False  # `prefill` computes what `decode` lacks of the prompt
    num_cached: int = 0  # prompt tokens whose KV was not computed for the attempt
    num_tokens: int = 0  # of the answer
    prefilled: Timing | None = None  # the prefill worker's part
    decoded: Timing | None = None  # the decode worker's part, of an answer that came to its end
    reason: str = ""  # why it ended without a whole answer
    is_failure: bool = False

    def place(self, decode: WorkerName, prefill: WorkerName | None, now: float) -> None:
        self.decode, self.prefill, self.placed_s = decode, prefill, now

    def reserve(self, needs_prefill: bool, num_cached: int, now: float) -> None:
        self.is_handed_off = needs_prefill and self.prefill is not None
        self.num_cached, self.reserved_s = num_cached, now

    def finish_prefill(self, timing: Timing, now: float) -> None:
        self.prefilled, self.num_cached, self.prefilled_s = timing, timing.cached_tokens, now

    def add_tokens(self, num_tokens: int, timing: Timing | None, now: float) -> None:
        """`timing`: the decode worker's part, with the last tokens."""
        self.num_tokens += num_tokens
        self.decoded = timing
        if num_tokens and self.first_token_s is None:
            self.first_token_s = now

    def close(self, now: float, reason: str = "", is_failure: bool = False) -> None:
        """It ended, or was left. Later calls change nothing."""
        if self.ended_s is None:
            self.ended_s, self.reason, self.is_failure = now, reason, is_failure

    def parts(self) -> list[tuple[Part, float, float]]:
        """(name, start, end) of each part that was reached, without gaps; the attempt ended in the last one.

        No transfer where nothing was transferred: the decode worker had the prompt's KV, or computed it.
        """
        assert self.ended_s is not None, "it still runs"
        starts: list[tuple[Part, float]] = [("queue", self.queued_s)]
        if self.placed_s is not None:
            starts.append(("prefill", self.placed_s))
        kv_s = self._find_kv_complete()
        if kv_s is not None:
            if self.reserved_s is not None and self.prefilled is not None and self.prefilled.transport:
                starts.append(("transfer", min(self.reserved_s + self.prefilled.prefill_s, kv_s)))
            starts.append(("decode", kv_s))
        ends = [*(start for _, start in starts[1:]), self.ended_s]
        return [(part, start, end) for (part, start), end in zip(starts, ends, strict=True)]

    def _find_kv_complete(self) -> float | None:
        """When decode had all KV: by the prefill worker's answer, or else its own timing; before the first token."""
        kv_s = self.prefilled_s
        if kv_s is None and self.reserved_s is not None and self.decoded is not None:
            kv_s = self.reserved_s + self.decoded.prefill_s
        return min((time for time in (kv_s, self.first_token_s) if time is not None), default=None)
