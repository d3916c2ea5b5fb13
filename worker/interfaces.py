"""Interfaces of what some workers have beside pages: recurrent states, and adapters. Pure.

Each class is also the object of a worker without the feature, so the core never asks whether it is there.
states/ and adapters/ implement them.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from wire.page_keys import PageKey
from worker.prefix_cache import NoRoomError, PrefixCache
from worker.sequences import NO_ADAPTER, NO_STATE, HeldAdapter, ScheduledSequence, Sequence, SequenceState


class States:
    """The recurrent states of sequences, in slots: pages of a second pool. Models with attention alone have none."""

    cache: PrefixCache  # of slots

    def __init__(self) -> None:
        self.cache = PrefixCache(0, [])

    def find(self, keys: Seq[PageKey]) -> tuple[int, int]:
        """(how many of these cached leading pages a step can continue behind, slot with the state there; -1: none)."""
        return len(keys), -1

    def num_received(self, num_cached: int, is_all: bool) -> int:
        """How many of the cached pages a prompt takes whose rest is received. `is_all`: no rest is left."""
        return num_cached

    def open(self, checkpoint: int, checkpoint_at: int, branch: int = 0) -> SequenceState:
        """State of a sequence that continues at a checkpoint, or at 0. NoRoomError, and nothing is held.

        `branch`: pages were found up to there.
        """
        return NO_STATE

    def open_receiving(self, has_checkpoint: bool) -> SequenceState:
        """State of a sequence that gets it, and perhaps a checkpoint, from another worker. NoRoomError."""
        return NO_STATE

    def finish_receiving(self, state: SequenceState, checkpoint_at: int) -> None:
        """The state has arrived in the first target; a checkpoint in the second, unless `checkpoint_at` is 0."""

    def find_stop(self, sequence: Sequence, launched: int) -> int:
        """Where a step from `launched` on has to end at the latest."""
        return sequence.most_tokens

    def begin_step(self, sequence: Sequence) -> tuple[int, int]:
        """The slots that the sequence's next step reads and writes; -1: none."""
        return -1, -1

    def take_back(self, step: ScheduledSequence) -> None:
        """The sequence's last launched step is to be launched again, from `launched` on."""

    def count_computed(self, step: ScheduledSequence, num_right: int) -> int:
        """Positions that a finished step leaves computed, if so many of its drafts were right."""
        return step.sequence.computed + step.count + num_right

    def forget(self, sequence: Sequence) -> None:
        """The state that the launched steps leave is not to be used."""

    def finish_step(self, sequence: Sequence) -> None:
        """All steps from before `computed` on are collected."""

    def offered(self, sequence: Sequence, positions: range) -> list[int]:
        """The slots to offer with `positions`: with the last ones the state after them, and that after whole pages."""
        return []

    def close(self, sequence: Sequence) -> None:
        """The sequence holds nothing any more."""

    def check(self, sequences: Seq[Sequence], restored: Seq[int] = ()) -> None:
        """Check which sequences hold, read and write which slots. `restored`: slots that are held, too."""


class UnknownAdapterError(Exception):
    """The adapter is not loaded here; another worker may have it."""


class NoSlotError(NoRoomError):
    """Sequences have all slots for adapters; those without an adapter may have room."""


class Adapters:
    """The adapters (LoRA) that sequences may have: none."""

    num_slots: int = 0

    @property
    def names(self) -> Mapping[str, str]:
        """Digest |-> name of each that sequences may have."""
        return {}

    def check_room(self, digest: str) -> None:
        """Raises UnknownAdapterError or NoSlotError if a sequence cannot have it now. Empty: the base model."""
        if digest:
            raise UnknownAdapterError(f"adapter {digest[:64]!r} is not loaded here, which takes none (--max-loras 0)")

    def acquire(self, digest: str) -> HeldAdapter:
        """Hold it for one more sequence, in a slot that stays its own until `release`. Raises like `check_room`."""
        self.check_room(digest)
        return NO_ADAPTER

    def release(self, digest: str) -> None:
        """One of its sequences is gone, and all steps that had it are collected."""

    def take_dropped(self) -> list[str]:
        """Keys of loads whose memory is to be freed, after all steps launched before."""
        return []

    def check(self, held: Seq[HeldAdapter]) -> None:
        """`held`: what each sequence has."""
