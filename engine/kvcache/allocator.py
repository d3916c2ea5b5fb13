"""Which pages of a pool are held. Pure: ints only, no tensors, no clock, no locks (the owner serialises calls)."""

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

        free ──allocate (generation + 1)──► held by one caller ──free──► free

    A page's generation changes exactly when it gets a new owner, before that owner can write to it. So whoever copied a
    page and then finds the generation it was promised knows that the copy holds the promised owner's bytes.
    """

    def __init__(self, num_pages: int, generations: Generations) -> None:
        """`generations`: one counter a page, modified here and read by peers (often in shared memory)."""
        self._generations = generations
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: pages used last are still in cache
        self._held = [False] * num_pages

    @property
    def num_pages(self) -> int:
        return len(self._held)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._held) - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Give out `count` pages, or none and raise NoRoomError."""
        if count > len(self._free):
            raise NoRoomError(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._held[page] = True
            self._generations[page] += 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back. Freeing a page that is not held is a bug of the caller and raises ValueError."""
        for page in pages:
            if not self._held[page]:
                raise ValueError(f"page {page} is freed but nobody holds it")
            self._held[page] = False
            self._free.append(page)

    def check(self) -> None:
        """Every page is either on the free stack once, or held."""
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a page is free twice")
        if any(self._held[page] for page in self._free):
            raise AssertionError("a held page is on the free stack")
        if len(self._free) + sum(self._held) != len(self._held):
            raise AssertionError("a page is neither free nor held")


def num_pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that `num_tokens` positions fill, the last one perhaps in part."""
    return -(-num_tokens // page_tokens)
