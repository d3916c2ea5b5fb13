"""The table of a worker's sequences: which are there, and when they go. Pure.

sequences.py draws a sequence's life; admission.py lets sequences in, scheduler.py decides which of them run. `now` is
passed in; the caller serialises calls.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from worker.interfaces import Adapters
from worker.kv_cache import KVCacheManager
from worker.sequences import Phase, Sequence, Update


@dataclass(slots=True)
class SequenceTable:
    """Owns the sequences, which hold pages of `kv` and rows of the engine."""

    kv: KVCacheManager
    max_running: int
    lease_s: float
    adapters: Adapters = field(default_factory=Adapters)
    on_empty: Callable[[], None] = lambda: None  # called when the last sequence is gone
    most_answers: Callable[[int], int] = lambda limit: limit  # that keep the goal, at most `limit` (chunks.py)
    num_preemptions: int = 0
    num_expired: int = 0  # expired leases
    num_launched: int = 0  # steps launched and not collected, summed over sequences
    is_short: bool = False  # the last plan lacked pages: collect launched steps, then others can be preempted
    _sequences: dict[int, Sequence] = field(default_factory=dict)  # id |-> sequence, oldest first
    _by_handle: dict[tuple[str, int], int] = field(default_factory=dict)  # (gateway, handle) |-> id
    _next_id: int = 1
    _free_rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free_rows = list(range(num_rows_for(self.max_running)))

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._sequences.values()))  # a copy: metrics read from another thread, and loops end sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, sequence_id: int) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def __getitem__(self, sequence_id: int) -> Sequence:
        return self._sequences[sequence_id]

    @property
    def num_running(self) -> int:
        return sum(sequence.phase is not Phase.ENDED for sequence in self)

    @property
    def num_tokens_waiting(self) -> int:
        """Tokens whose KV is still to be computed here, besides each answer's last one."""
        computing = [sequence for sequence in self if sequence.phase in (Phase.ACTIVE, Phase.PREEMPTED)]
        return sum(max(sequence.num_missing - (sequence.params.max_tokens > 0), 0) for sequence in computing)

    def in_phase(self, phase: Phase) -> list[Sequence]:
        """Oldest first."""
        return [sequence for sequence in self if sequence.phase is phase]

    def expire(self, now: float) -> list[Update]:
        """End sequences whose KV did not arrive within the lease."""
        error = f"no KV arrived within the lease of {self.lease_s:g} s (--lease-s)"
        late = [sequence for sequence in self._find_leased() if sequence.deadline <= now]
        self.num_expired += len(late)
        return [self.fail(sequence, error, now, "expired") for sequence in late]

    def next_deadline(self) -> float | None:
        """When `expire` must be called next."""
        return min((sequence.deadline for sequence in self._find_leased()), default=None)

    def _find_leased(self) -> list[Sequence]:
        """Sequences that wait for the next offer; reads have their own time limit."""
        return [sequence for sequence in self.in_phase(Phase.RECEIVING) if not sequence.is_read]

    def fail(self, sequence: Sequence, error: str, now: float, reason: str = "error") -> Update:
        """End a sequence with `error`, or another `reason`. Its pages stay held while something needs them."""
        update = Update(sequence, (), reason, error, timing=sequence.timing(now))
        self._end(sequence)
        return update

    def end(self, sequence: Sequence) -> None:
        """Its Run call is over, with any result. Idempotent."""
        sequence.is_kept = False
        if sequence.id in self._sequences:
            self._end(sequence)

    def abort(self, gateway: str, handles: Collection[int] | None = None) -> list[Sequence]:
        """End sequences of `gateway`: all, or those with these handles. Ignores unknown handles. Returns the ended."""
        ended = [
            sequence for sequence in self
            if sequence.phase is not Phase.ENDED and sequence.params.gateway == gateway
            and (handles is None or sequence.params.handle in handles)
        ]  # fmt: skip
        for sequence in ended:
            self._end(sequence)
        return ended

    def _end(self, sequence: Sequence) -> None:
        sequence.phase = Phase.ENDED
        self.remove_if_over(sequence)

    def remove_if_over(self, sequence: Sequence) -> None:
        """An ended sequence goes once no step, read or Run call needs its pages."""
        if sequence.phase is not Phase.ENDED or sequence.num_steps_launched:
            return
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
        if sequence.is_read or sequence.is_kept:
            return
        self.kv.release(sequence)
        self.adapters.release(sequence.params.adapter)
        del self._sequences[sequence.id]
        self._by_handle.pop((sequence.params.gateway, sequence.params.handle), None)
        if not self._sequences:
            self.on_empty()

    def check(self) -> None:
        """Check pages, slots, adapters and rows, and that each sequence's phase fits what it has."""
        sequences = list(self)
        self.kv.check(sequences)
        self.adapters.check([sequence.adapter for sequence in sequences])
        for sequence in sequences:
            is_answering = sequence.phase is Phase.ACTIVE and sequence.params.max_tokens
            if is_answering and len(sequence.tokens) <= sequence.computed:
                raise AssertionError(f"active sequence {sequence.id} has no token left to step on")
            if sequence.phase is Phase.PREEMPTED and sequence.pages:
                raise AssertionError(f"sequence {sequence.id} is preempted and holds pages")
        rows = [sequence.row for sequence in sequences if sequence.row >= 0]
        if sorted(rows + self._free_rows) != list(range(num_rows_for(self.max_running))):
            raise AssertionError("a row belongs to two sequences, or to none and is not free")


def num_rows_for(max_running: int) -> int:
    """Rows that the engine needs: ended sequences keep theirs until their last step is collected."""
    return 2 * max_running
