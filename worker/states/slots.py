"""Slots of state: which one a sequence's next step reads and writes, and which are kept as checkpoints. Pure: ints.

Layers without attention keep a state of fixed size instead of keys and values. A slot holds it for all such layers. The
slots of a pool are owned like its pages (prefix_cache.py), with one difference: a step reads one slot and writes
another, so that it can be launched again, as long as no later step of its sequence was.

    positions      0 ······ 32 ······ 48 ···· 55
    slots                   C    A         B       C: checkpoint   step 55 reads B and writes A, step 56 reads A ...

After a wrong draft, the sequence goes on from the slot that the step read: its right tokens are computed again.

A checkpoint is the state at a page boundary. No step writes to it, and it has the key of the page that ends there: a
prompt that finds pages continues at the last one that has a checkpoint.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from wire.page_keys import PageKey
from worker.interfaces import States
from worker.prefix_cache import PrefixCache
from worker.sequences import NO_STATE, ScheduledSequence, Sequence, SequenceState

MOST_SLOTS = 3  # of a sequence, but for a moment
LEAST_SPACING = 512  # tokens: a step of fewer costs a worker more than a hit saves


@dataclass(slots=True)
class HeldSlots(SequenceState):
    """One sequence's slots."""

    held: list[int]  # the two below, and those that the next steps write to
    source: int = -1  # has the state after all launched steps; -1: there were none, or it has not arrived
    checkpoint: int = -1  # has the state after `checkpoint_at` positions
    checkpoint_at: int = 0  # 0: there is no checkpoint
    branch: int = 0  # pages were found up to here, beyond the checkpoint: other prompts probably branch off here too
    retired: list[tuple[int, int]] = field(default_factory=list)  # earlier checkpoints that a launched step may read
    last_source: int = -1  # what the last launched step reads

    @property
    def is_held(self) -> bool:
        return bool(self.held)

    @property
    def sources(self) -> set[int]:
        """Slots that are read, or may be: by steps or by others. -1 for what is not there."""
        return {self.source, self.checkpoint, *(slot for slot, _at in self.retired)}

    @property
    def targets(self) -> list[int]:
        """Slots that may be written to."""
        sources = self.sources
        return [slot for slot in self.held if slot not in sources]


class StateSlots(States):
    """The slots of a worker, and what its sequences do with theirs."""

    def __init__(self, cache: PrefixCache, page_tokens: int, spacing: int) -> None:
        """`spacing`: tokens between checkpoints within a prompt or answer; a multiple of `page_tokens`."""
        self.cache = cache
        self.page_tokens = page_tokens
        self.spacing = spacing

    def find(self, keys: Seq[PageKey]) -> tuple[int, int]:
        """(number of leading pages, slot): the last of these keys that has a checkpoint; (0, -1) if none has."""
        for count in range(len(keys), 0, -1):
            if found := self.cache.find(keys[count - 1 : count]):
                return count, found[0]
        return 0, -1

    def num_received(self, num_cached: int, is_all: bool) -> int:
        return num_cached - is_all  # the state comes with some pages

    def open(self, checkpoint: int, checkpoint_at: int, branch: int = 0) -> SequenceState:
        """Slots of a sequence that continues at a checkpoint, or at 0. NoRoomError, and nothing is held."""
        found = [checkpoint] if checkpoint_at else []
        self.cache.hold(found)
        try:
            fresh = self.cache.allocate(MOST_SLOTS - 1)
        except BaseException:
            self.cache.release(found)
            raise
        return HeldSlots(found + fresh, checkpoint, checkpoint, checkpoint_at, branch)

    def open_receiving(self, has_checkpoint: bool) -> SequenceState:
        """Slots of a sequence whose state, and perhaps a checkpoint, comes from another worker. NoRoomError."""
        return HeldSlots(self.cache.allocate(MOST_SLOTS - (not has_checkpoint)))

    def finish_receiving(self, state: SequenceState, checkpoint_at: int) -> None:
        """The state has arrived in the first target; a checkpoint in the second, unless `checkpoint_at` is 0."""
        assert isinstance(state, HeldSlots)
        state.source, *others = state.targets
        if checkpoint_at:
            state.checkpoint, state.checkpoint_at = others[0], checkpoint_at

    def find_stop(self, sequence: Sequence, launched: int) -> int:
        """Where a step from `launched` on has to end at the latest: where its state is to be kept."""
        state = _state_of(sequence)
        if not state.held:
            return sequence.most_tokens
        spaced = (launched // self.spacing + 1) * self.spacing
        stops = (self._last_border(sequence.num_known), state.branch, spaced)
        return min(stop for stop in stops if stop > launched)

    def _last_border(self, num_tokens: int) -> int:
        return num_tokens // self.page_tokens * self.page_tokens

    def begin_step(self, sequence: Sequence) -> tuple[int, int]:
        """The slots that the sequence's next step reads and writes; the one read may become a checkpoint."""
        state, launched = _state_of(sequence), sequence.launched
        if not state.held:
            return -1, -1
        is_border = launched % self.page_tokens == 0
        is_last = launched >= self._last_border(sequence.num_known)  # of the prompt, or anywhere in the answer
        if is_border and (is_last or launched == state.branch or launched % self.spacing == 0):
            self._keep(state, launched)
        target = next((slot for slot in state.targets if slot != state.last_source), state.targets[0])
        step = state.source, target
        state.last_source, state.source = step
        self._name(sequence)
        return step

    def _keep(self, state: HeldSlots, at: int) -> None:
        """The source becomes the checkpoint; the old one is retired. Nothing changes if there is no slot to spare."""
        if state.source < 0 or state.source == state.checkpoint:
            return
        if len(state.targets) < 2:  # a dropped plan may have left one
            if not self.cache.num_spare:
                return
            state.held += self.cache.allocate(1)
        if state.checkpoint_at:
            state.retired.append((state.checkpoint, state.checkpoint_at))
        state.checkpoint, state.checkpoint_at = state.source, at

    def take_back(self, step: ScheduledSequence) -> None:
        """The sequence's last launched step is to be launched again, from `launched` on."""
        state = _state_of(step.sequence)
        if state.source == step.slots[1]:  # otherwise a later step has begun on it, or one before it failed
            state.source = step.slots[0]
        if state.checkpoint_at > step.sequence.launched:
            state.checkpoint, state.checkpoint_at = state.retired.pop() if state.retired else (-1, 0)

    def count_computed(self, step: ScheduledSequence, num_right: int) -> int:
        """The state after a wrong draft is not used: the step's right tokens are computed again."""
        if num_right == len(step.drafts) or not step.sequence.state.is_held:
            return States.count_computed(self, step, num_right)
        step.sequence.launched = step.begin
        self.take_back(step)
        return step.begin

    def forget(self, sequence: Sequence) -> None:
        if sequence.state.is_held:
            _state_of(sequence).source = -1

    def finish_step(self, sequence: Sequence) -> None:
        """All steps from before `computed` on are collected: release the checkpoints that only they read."""
        state, computed = _state_of(sequence), sequence.computed
        if not state.held:
            return
        self._name(sequence)
        over = [slot for slot, at in state.retired if at < computed]
        state.retired = [kept for kept in state.retired if kept[1] >= computed]
        state.held = [slot for slot in state.held if slot not in over]
        self.cache.release(over)

    def _name(self, sequence: Sequence) -> None:
        """Let others find checkpoints that are there and stay useful while this sequence goes on."""
        state = _state_of(sequence)
        lasting = state.branch, self._last_border(sequence.params.end)
        for slot, at in (*state.retired, (state.checkpoint, state.checkpoint_at)):
            if 0 < at <= sequence.computed and (at in lasting or at % self.spacing == 0):
                self.cache.name(slot, sequence.keys[at // self.page_tokens - 1])

    def offered(self, sequence: Sequence, positions: range) -> list[int]:
        state, end = _state_of(sequence), sequence.params.end
        if not state.held or positions.stop < end:
            return []
        whole = end // self.page_tokens * self.page_tokens
        return [state.source, *([state.checkpoint] if 0 < whole == state.checkpoint_at < end else [])]

    def close(self, sequence: Sequence) -> None:
        """Release the slots. The last state at a page boundary stays as a checkpoint."""
        state, computed = _state_of(sequence), sequence.computed
        is_border = computed and computed == sequence.launched and computed % self.page_tokens == 0
        if is_border and state.source >= 0:
            self.cache.name(state.source, sequence.keys[computed // self.page_tokens - 1])
        if 0 < state.checkpoint_at <= computed:
            self.cache.name(state.checkpoint, sequence.keys[state.checkpoint_at // self.page_tokens - 1])
        self.cache.release(state.held)
        sequence.state = NO_STATE

    def check(self, sequences: Seq[Sequence], restored: Seq[int] = ()) -> None:
        """Check holder counts, and that steps write only to slots that nothing else reads. `restored`: held, too."""
        states = [_state_of(sequence) for sequence in sequences if sequence.state.is_held]
        self.cache.check([*restored, *(slot for state in states for slot in state.held)])
        written = [*restored, *(slot for state in states for slot in state.targets)]
        read = {slot for state in states for slot in state.sources}
        if len(set(written)) != len(written) or not read.isdisjoint(written):
            raise AssertionError("a step may write to a slot that is read elsewhere")
        for state in states:
            if not state.sources <= {*state.held, -1}:
                raise AssertionError("a sequence uses a slot that it does not hold")
            if (state.checkpoint < 0) != (state.checkpoint_at == 0) or not state.targets:
                raise AssertionError(f"a sequence's slots do not fit each other: {state}")


def _state_of(sequence: Sequence) -> HeldSlots:
    """An empty one where the sequence holds nothing."""
    return sequence.state if isinstance(sequence.state, HeldSlots) else HeldSlots([])


def choose_spacing(slot_bytes: int, page_bytes: int, page_tokens: int) -> int:
    """Tokens between checkpoints, so that these take no more memory than the pages they continue."""
    pages = max(-(-slot_bytes // page_bytes), -(-LEAST_SPACING // page_tokens))
    return pages * page_tokens
