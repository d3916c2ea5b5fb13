"""The pages and slots of a worker's sequences: found by key, given out, and named once their KV is complete. Pure.

prefix_cache.py describes a page, states/ a slot. The scheduler decides which sequence gets them.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from wire.images import name_images
from wire.page_keys import TOKEN_BYTES, PageKey, next_key, page_keys, root_key
from worker.interfaces import States
from worker.params import ANY_NUMBER, SequenceParams
from worker.prefix_cache import PrefixCache
from worker.sequences import Phase, Sequence


class Hit(NamedTuple):
    """The cached part of a prompt."""

    pages: list[int]
    num_usable: int  # of these pages: a step can continue behind them
    checkpoint: int  # the slot with the state behind the usable pages; -1: none


class Restore(NamedTuple):
    """Pages, and perhaps a slot, that are filled from elsewhere before a prompt needs them. Held until it ends."""

    keys: Seq[PageKey]
    pages: list[int]
    slot_keys: Seq[PageKey]
    slots: list[int]
    before: list[int]  # cached pages that these continue: held, too


@dataclass(slots=True)
class KVCacheManager:
    """Owns the pages and slots, and what a sequence has of them. The caller serialises calls."""

    cache: PrefixCache  # of pages
    page_tokens: int
    model: str = ""  # fingerprint of the weights
    num_after: int = 0  # tokens after a page that its KV depends on: 1 with a draft head
    states: States = field(default_factory=States)
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

    def find(self, keys: Seq[PageKey]) -> Hit:
        """The pages cached under the leading keys. Does not hold them."""
        pages = self.cache.find(keys)
        return Hit(pages, *self.states.find(keys[: len(pages)]))

    def choose_pages(self, hit: Hit, sequence: Sequence) -> list[int]:
        """The pages of the hit that the sequence is to hold: usable ones; all, if its state is received."""
        if sequence.phase is not Phase.RECEIVING:
            return hit.pages[: hit.num_usable]
        is_all = len(hit.pages) * self.page_tokens == sequence.params.end
        return hit.pages[: self.states.num_received(len(hit.pages), is_all)]

    def num_needed(self, params: SequenceParams, num_tokens: int) -> int:
        """Pages for all tokens of a sequence that has so many."""
        return self.num_pages(num_tokens if params.max_tokens else params.end)

    def open(self, sequence: Sequence, hit: Hit, found: list[int]) -> None:
        """Hold the pages `found`, allocate the others, and slots. NoRoomError: there are no slots, nothing is held."""
        if sequence.phase is Phase.RECEIVING:
            sequence.state = self.states.open_receiving(has_checkpoint=sequence.params.end >= self.page_tokens)
        else:
            ends = hit.num_usable * self.page_tokens, len(hit.pages) * self.page_tokens
            sequence.state = self.states.open(hit.checkpoint, *ends)
        self.cache.hold(found)
        needed = self.num_needed(sequence.params, len(sequence.tokens))
        sequence.pages = found + self.cache.allocate(needed - len(found))
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
        self.cache.release(sequence.pages, sequence.params.retention)
        sequence.pages = []
        sequence.num_pages_in_row = -1  # what steps drop from a row, such as images' encodings, is needed again

    def pages_of(self, sequence: Sequence, positions: range) -> list[int]:
        """The pages that hold `positions`, which start on a page boundary."""
        return sequence.pages[positions.start // self.page_tokens : self.num_pages(positions.stop)]

    def check(self, sequences: Seq[Sequence]) -> None:
        """Check holder counts, that no two sequences write to one page, and that KV counts fit the pages."""
        pages = [sequence.pages for sequence in sequences]
        pages += [page for restore in self.restores for page in (restore.before, restore.pages)]
        self.cache.check(chain.from_iterable(pages))
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


def num_pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that `num_tokens` positions fill, the last one perhaps in part."""
    return -(-num_tokens // page_tokens)
