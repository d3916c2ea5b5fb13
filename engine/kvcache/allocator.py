"""Which pages of a pool are held. Pure: ints only, no tensors, no clock, no locks (the owner serialises calls)."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol


class Generations(Protocol):
    """One counter a page: a list, or an array in shared memory."""

    def __getitem__(self, page: int, /) -> Any: ...

    def __setitem__(self, page: int, generation: Any, /) -> None: ...


class NoRoomError(Exception):
    """Not now: pages or places are taken; trying again later helps."""


class NeverFitsError(Exception):
    """Not ever: more is wanted than there is."""


class PageAllocator:
    """Gives pages out and takes them back.

    Ownership of one page over time:

                                            ┌ share (holders + 1) ┐
        free ──allocate (generation + 1)──► held by one or more ◄─┘ ──free (holders - 1)──► ... the last one ──► free

    A page's generation changes exactly when it leaves the free ones, before its new owner can write to it. So whoever
    copied a page and then finds the generation it was promised knows that the copy holds the promised owner's bytes.
    Who shares a page knows which part of it nobody writes to any more.
    """

    def __init__(self, num_pages: int, generations: Generations) -> None:
        """`generations`: one counter a page, modified here and read by peers (often in shared memory)."""
        self._generations = generations
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: pages used last are still in cache
        self._num_holders = [0] * num_pages  # page |-> how many hold it

    @property
    def num_pages(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._num_holders) - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Give out `count` pages, or none and raise NoRoomError."""
        if count > len(self._free):
            raise NoRoomError(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
            self._generations[page] += 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for pages that are held, each to be freed once more. ValueError for one that nobody holds."""
        for page in pages:
            if not self._num_holders[page]:
                raise ValueError(f"page {page} is to be shared but nobody holds it")
            self._num_holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """One holder less for each page; without any it is free. ValueError for one that nobody holds: a bug."""
        for page in pages:
            if not self._num_holders[page]:
                raise ValueError(f"page {page} is freed but nobody holds it")
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                self._free.append(page)

    def check(self, held: Iterable[int] | None = None) -> None:
        """Every page is either on the free stack once, or held; by as many as name it in `held`, if given."""
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a page is free twice")
        if any(self._num_holders[page] for page in self._free):
            raise AssertionError("a held page is on the free stack")
        if self.num_used != sum(num > 0 for num in self._num_holders):
            raise AssertionError("a page is neither free nor held")
        if held is not None:
            found = Counter(held)
            for page, num in enumerate(self._num_holders):
                if num != found[page]:
                    raise AssertionError(f"page {page} counts {num} holders, {found[page]} know of it")


def num_pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that `num_tokens` positions fill, the last one perhaps in part."""
    return -(-num_tokens // page_tokens)
