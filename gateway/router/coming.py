"""Prompts that are being computed now, so that requests that share much with one can wait for it. Pure.

Chains of keys are compared at **marks**: the key at every MARK_TOKENS tokens, and the last one. The marks that two
prompts share are the first ones of both, so the last of them tells how long the shared part is.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from wire.page_keys import PageKey

LEAST_SHARED = 512  # tokens: for a shorter part no request waits
MARK_TOKENS = 64  # a quarter of the keys in pages of 16: the work a request, and the error of a shared part's length


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """A decode worker is about to have the KV of a prompt's whole pages."""

    marks: Sequence[PageKey]
    incarnation: str  # of the decode worker
    num_tokens: int  # in the whole pages
    num_there: int  # of these, tokens whose KV some worker had when it began

    @property
    def num_computed(self) -> int:
        return self.num_tokens - self.num_there


@dataclass(frozen=True, slots=True)
class Overlap:
    """The longest part that a prompt shares with coming ones."""

    num_tokens: int = 0
    coming: Sequence[Coming] = ()

    def find_worth(self, num_there: int) -> list[Coming]:
        """The coming prompts for which a request waits whose first `num_there` tokens some worker has.

        When the other began, the shared part was long, and at least half of what the other computes: the request waits
        no longer than computing twice as much would take. It does not go on with half of the part, as all that wait
        would compute the rest; with all of it only if the other is not about to end.
        """
        return [one for one in self.coming if self._is_worth(one) and not self._is_ahead(one, num_there)]

    def _is_worth(self, one: Coming) -> bool:
        num_shared = self.num_tokens - one.num_there
        return num_shared >= LEAST_SHARED and num_shared * 2 >= one.num_computed

    def _is_ahead(self, one: Coming, num_there: int) -> bool:
        return num_there >= self.num_tokens and one.num_tokens - num_there >= LEAST_SHARED

    def find_equal(self, num_tokens: int) -> list[Coming]:
        """The coming prompts that have the same whole pages, which are `num_tokens` tokens."""
        return [one for one in self.coming if one.num_tokens == self.num_tokens == num_tokens]


class ComingIndex:
    """Owns the coming prompts, by their marks."""

    def __init__(self) -> None:
        self._coming: dict[PageKey, dict[Coming, None]] = {}  # mark |-> those that have it; none is empty

    def begin(self, keys: Sequence[PageKey], page_tokens: int, incarnation: str, num_there: int) -> Coming:
        """Add a prompt. `keys`: of its whole pages, at least one. Returns what to `end`."""
        marks = [keys[at] for at in _find_marks(len(keys), page_tokens)]
        one = Coming(marks, incarnation, len(keys) * page_tokens, num_there)
        for mark in marks:
            self._coming.setdefault(mark, {})[one] = None
        return one

    def end(self, one: Coming) -> None:
        """Remove a prompt: its KV is there, or will never be."""
        for mark in one.marks:
            having = self._coming[mark]
            del having[one]
            if not having:
                del self._coming[mark]

    def find(self, keys: Sequence[PageKey], page_tokens: int) -> Overlap:
        """Find what a prompt shares with coming ones. Changes nothing."""
        if not keys or not self._coming:
            return Overlap()
        marks = _find_marks(len(keys), page_tokens)
        count = bisect_left(marks, True, key=lambda at: keys[at] not in self._coming)
        if not count:
            return Overlap()
        last = marks[count - 1]
        return Overlap((last + 1) * page_tokens, list(self._coming[keys[last]]))

    def __len__(self) -> int:
        """The number of marks."""
        return len(self._coming)


def _find_marks(num_keys: int, page_tokens: int) -> list[int]:
    """Positions in a chain of keys."""
    step = max(MARK_TOKENS // page_tokens, 1)
    last = num_keys - 1
    return [*range(step - 1, last, step), last]
