"""The pages and slots of a worker's sequences: found by key, given out, and named once their KV is complete. Pure.

prefix_cache.py describes a page, states/slots.py a slot. The scheduler decides which sequence gets them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from wire.images import name_images
from wire.page_keys import TOKEN_BYTES, PageKey, next_key, page_keys, root_key
from worker.prefix_cache import NoRoomError, PrefixCache, num_pages_for
from worker.sequences import ANY_NUMBER, Phase, Sequence, SequenceParams
from worker.states.slots import StateSlots, no_states


class Hit(NamedTuple):
    """What is cached of a prompt."""

    pages: list[int]
    num_usable: int  # of these pages: a step can continue behind them
    checkpoint: int  # the slot with the state behind the usable pages; -1: none


class RestorePlan(NamedTuple):
    """What to read from elsewhere, so that a prompt can continue there."""

    keys: Seq[PageKey]  # of pages, behind those that are cached
    slot_keys: Seq[PageKey]  # of one slot, or none


def plan_restore(
    keys: Seq[PageKey], num_there: int, num_usable: int, num_found: int, has_slot: Callable[[PageKey], bool] | None
) -> RestorePlan:
    """Of a prompt's keys `num_there` are cached, a step could continue behind `num_usable`, `num_found` are to be had.

    `has_slot`: whether a key's checkpoint is to be had; None: the model has no states.
    """
    if has_slot is None:
        return RestorePlan(keys[num_there:num_found], ())
    end = next((at for at in range(num_found, num_usable, -1) if has_slot(keys[at - 1])), 0)
    return RestorePlan(keys[num_there:end], keys[end - 1 : end] if end else ())


def plan_loan(keys: Seq[PageKey], begin: int, num_pages: int, num_slots: int) -> RestorePlan:
    """What another worker lends of the pages of these keys: from `begin` on, and perhaps the slot behind the last."""
    end = begin + num_pages
    return RestorePlan(keys[begin:end], keys[end - 1 : end] if num_slots else ())


class Restore(NamedTuple):
    """Pages, and perhaps a slot, that are filled from elsewhere before a prompt needs them. Held until it ends."""

    keys: Seq[PageKey]
    pages: list[int]
    slot_keys: Seq[PageKey]
    slots: list[int]


class Loan(NamedTuple):
    """Cached pages, and perhaps the slot behind the last one, that another worker is about to read."""

    pages: list[int]
    slots: list[int]
    held: list[int]  # those pages, and all before them


@dataclass(slots=True)
class KVCacheManager:
    """Owns the pages and slots, and what a sequence has of them. The caller serialises calls."""

    cache: PrefixCache  # of pages
    page_tokens: int
    model: str = ""  # fingerprint of the weights
    num_after: int = 0  # tokens after a page that its KV depends on: 1 with a draft head
    states: StateSlots = field(default_factory=no_states)
    needs_draft: bool = False  # pages are used only with the draft model's KV, as a prefill worker offers both
    max_offer_pages: int = ANY_NUMBER  # bounds the duration of a read
    num_queried: int = 0  # prompt tokens looked up
    num_hit: int = 0  # of those, the cached ones
    restores: list[Restore] = field(default_factory=list)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that so many positions fill, the last one perhaps in part."""
        return num_pages_for(num_tokens, self.page_tokens)

    def keys_of(self, params: SequenceParams) -> list[PageKey]:
        """Keys of the whole pages before `params.end`. 6 ms for 128k tokens: computed before locking."""
        tokens = params.prompt[: (params.end + self.num_after) * TOKEN_BYTES]
        return list(page_keys(self._root_of(params), tokens, self.page_tokens, self.num_after, params.images))

    def _root_of(self, params: SequenceParams) -> PageKey:
        """The parent key of the first page."""
        return root_key(self.model, params.cache_salt, params.adapter)

    # -- what a sequence has -------------------------------------------------------------------------------------

    def find(self, keys: Seq[PageKey]) -> Hit:
        """What is cached under the leading keys. Does not hold it."""
        pages = self.cache.find(keys)
        return Hit(pages, *self.states.find(keys[: len(pages)]))

    def choose_pages(self, hit: Hit, sequence: Sequence) -> list[int]:
        """The pages of the hit that the sequence is to hold: usable ones; all, if its state is received."""
        if sequence.phase is not Phase.RECEIVING:
            return hit.pages[: hit.num_usable]
        is_all = self.states.exist and len(hit.pages) * self.page_tokens == sequence.params.end
        return hit.pages[:-1] if is_all else hit.pages  # the state comes with some pages

    def num_needed(self, sequence: Sequence) -> int:
        """Pages for all its tokens."""
        return self.num_pages(len(sequence.tokens) if sequence.params.max_tokens else sequence.params.end)

    def open(self, sequence: Sequence, hit: Hit, found: list[int]) -> None:
        """Hold the pages `found`, allocate the others, and slots. NoRoomError: there are no slots, nothing is held."""
        if sequence.phase is Phase.RECEIVING:
            sequence.state = self.states.open_receiving(has_checkpoint=sequence.params.end >= self.page_tokens)
        else:
            ends = hit.num_usable * self.page_tokens, len(hit.pages) * self.page_tokens
            sequence.state = self.states.open(hit.checkpoint, *ends)
        self.cache.hold(found)
        sequence.pages = found + self.cache.allocate(self.num_needed(sequence) - len(found))
        sequence.num_named = len(found)
        sequence.computed = sequence.launched = len(found) * self.page_tokens
        sequence.draft_computed = 0
        for page in found:
            if not self.cache.has_draft(page):
                break
            sequence.draft_computed += self.page_tokens
        sequence.draft_launched = sequence.draft_computed

    def extend(self, sequence: Sequence, count: int) -> None:
        """Give it `count` more pages. NoRoomError."""
        sequence.pages += self.cache.allocate(count)

    def advance(self, sequence: Sequence, computed: int) -> None:
        """KV of positions [0, computed) is in its pages: whole pages and checkpoints get their keys."""
        sequence.computed = computed
        size = self.page_tokens
        last = min(computed, len(sequence.tokens) - self.num_after) // size
        while (at := sequence.num_named) < last:
            if at == len(sequence.keys):
                parent = sequence.keys[-1] if sequence.keys else self._root_of(sequence.params)
                begin, end = at * size, (at + 1) * size + self.num_after
                others = name_images(sequence.params.images, begin, end)
                sequence.keys.append(next_key(parent, sequence.tokens[begin:end].tobytes() + others))
            self.cache.name(sequence.pages[at], sequence.keys[at])
            sequence.num_named += 1
        self.states.finish_step(sequence)

    def advance_draft(self, sequence: Sequence, computed: int) -> None:
        """The draft model's KV of positions [0, computed) is in its pages; a lower number invalidates the rest."""
        before, sequence.draft_computed = sequence.draft_computed, computed
        sequence.draft_launched = max(sequence.draft_launched, computed)
        for page in sequence.pages[before // self.page_tokens : computed // self.page_tokens]:
            self.cache.mark_draft(page)

    def release(self, sequence: Sequence) -> None:
        """Take back its pages and slots."""
        self.states.close(sequence)
        self.cache.release(sequence.pages)
        sequence.pages = []
        sequence.num_pages_in_row = -1  # what steps drop from a row, such as images' encodings, is needed again

    # -- what is restored ----------------------------------------------------------------------------------------

    def begin_restore(self, keys: Seq[PageKey], slot_keys: Seq[PageKey]) -> Restore:
        """Pages and slots for these keys, which are not cached, until `end_restore`. NoRoomError."""
        slots = self.states.cache.allocate(len(slot_keys))
        try:
            restore = Restore(keys, self.cache.allocate(len(keys)), slot_keys, slots)
        except NoRoomError:
            self.states.cache.release(slots)
            raise
        self.restores.append(restore)
        return restore

    def end_restore(self, restore: Restore, drafts: Seq[bool], num_slots: int) -> None:
        """Leading pages are filled, `drafts` says which with the draft model's KV, and so many slots: now cached."""
        self.restores.remove(restore)
        for page, key, has_draft in zip(restore.pages, restore.keys, drafts, strict=False):
            if has_draft:
                self.cache.mark_draft(page)
            elif self.needs_draft:
                break
            self.cache.name(page, key)
        for slot, key in zip(restore.slots[:num_slots], restore.slot_keys, strict=False):
            self.states.cache.name(slot, key)
        self.cache.release(restore.pages)
        self.states.cache.release(restore.slots)

    # -- what is lent --------------------------------------------------------------------------------------------

    def begin_loan(self, keys: Seq[PageKey], begin: int, most: int) -> Loan:
        """Of the cached pages of these keys that a step can continue behind, those from `begin` on, at most so many.

        The slot comes with the last of them. Held until `end_loan`, while their generations are named.
        """
        hit = self.find(keys)
        pages = hit.pages[begin : min(hit.num_usable, begin + most)]
        has_slot = bool(pages) and begin + len(pages) == hit.num_usable and hit.checkpoint >= 0
        loan = Loan(pages, [hit.checkpoint] if has_slot else [], hit.pages[: begin + len(pages)])
        self.cache.hold(loan.held)
        self.states.cache.hold(loan.slots)
        return loan

    def end_loan(self, loan: Loan) -> None:
        """What was lent counts as used now."""
        self.cache.release(loan.held)
        self.states.cache.release(loan.slots)

    # -- offers --------------------------------------------------------------------------------------------------

    def next_offer(self, sequence: Sequence, begin: int) -> range | None:
        """Positions from `begin` on that can be offered now: whole pages, plus the last part once all are computed."""
        computed, end = sequence.computed, sequence.params.end
        whole = computed if computed == end else computed // self.page_tokens * self.page_tokens
        stop = min(whole, begin + self.max_offer_pages * self.page_tokens)
        return range(begin, stop) if stop > begin else None

    def pages_of(self, sequence: Sequence, positions: range) -> list[int]:
        """The pages that hold `positions`, which start on a page boundary."""
        return sequence.pages[positions.start // self.page_tokens : self.num_pages(positions.stop)]

    def states_of(self, sequence: Sequence, positions: range) -> list[int]:
        """The slots to offer with `positions`: with the last ones the state after them, and that after whole pages."""
        state, end = sequence.state, sequence.params.end
        if not state.held or positions.stop < end:
            return []
        whole = end // self.page_tokens * self.page_tokens
        return [state.source, *([state.checkpoint] if 0 < whole == state.checkpoint_at < end else [])]

    def check(self, sequences: Seq[Sequence]) -> None:
        """Check holder counts, that no two sequences write to one page, and that KV counts fit the pages."""
        holders = [*(sequence.pages for sequence in sequences), *(restore.pages for restore in self.restores)]
        self.cache.check(chain.from_iterable(holders))
        self.states.check(sequences, [slot for restore in self.restores for slot in restore.slots])
        writers: set[int] = set()
        for sequence in sequences:
            end = max(sequence.computed, sequence.launched, sequence.draft_computed)
            if end > len(sequence.pages) * self.page_tokens:
                raise AssertionError(f"sequence {sequence.id} has KV, or will have, beyond its pages")
            writable = sequence.pages[sequence.computed // self.page_tokens :]
            if not writers.isdisjoint(writable):
                raise AssertionError(f"sequence {sequence.id} may write to a page that another one writes to")
            writers.update(writable)
        for sequence in sequences:
            if not writers.isdisjoint(sequence.pages[: sequence.computed // self.page_tokens]):
                raise AssertionError(f"a page that sequence {sequence.id} has completed may be written to")
