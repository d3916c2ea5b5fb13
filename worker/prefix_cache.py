"""The pages of a pool: free, held or cached, and their keys. Pure: ints and keys; the owner serialises calls.

                                         ┌──hold──┐
    free ──allocate (generation + 1)──► held by one or more ◄──hold── cached ──evicted (generation + 1)──► held
      ▲                                        │                        ▲
      └────────── last release, no key ────────┴── last release, key ───┘

A page with a key is full of known tokens: `name` sets the key, and equal prompts find it (wire/page_keys.py).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from wire.page_keys import PageKey
from wire.retention import Retention


class Generations(Protocol):
    """One counter per page: a list, or an array in shared memory."""

    def __getitem__(self, page: int, /) -> Any: ...

    def __setitem__(self, page: int, generation: Any, /) -> None: ...


class EvictionOrder(OrderedDict[int, float]):
    """Cached pages, next to evict first: without tiers/, those released first."""

    def take(self, page: int) -> None:
        """It is cached no more, if it was."""
        self.pop(page, None)

    def take_next(self) -> int:
        return self.popitem(last=False)[0]

    def keep(self, pages: Mapping[int, int], retention: Retention) -> None:
        """Keep pages, which may have other holders, for some time. `pages`: page |-> its place in the sequence."""

    def count_awaited(self, found: Sequence[int], count: int, retention: Retention | None = None) -> int:
        """Pages that a request for `count` beside those `found` leaves for requests that are about to come."""
        return 0


class KeyWatcher(Protocol):
    """Follows which keys a cache has, under the lock of its owner's caller: it returns at once."""

    def gain(self, key: PageKey, page: int) -> None:
        """The page is found by the key from now on."""

    def lose(self, key: PageKey, page: int) -> None:
        """The page gets a new owner."""


class NoRoomError(Exception):
    """No pages or sequence slots now; trying again later helps."""


class NeverFitsError(Exception):
    """More is needed than the worker has; trying again does not help."""


class PrefixCache:
    """The pages of one pool.

    A page's generation changes exactly when the page gets a new owner, before that owner can write to it. A cached page
    keeps its generation, so it can be offered to peers unchanged. A peer that copies a page and then finds the promised
    generation has the promised content.
    """

    def __init__(self, num_pages: int, generations: Generations, order: EvictionOrder | None = None) -> None:
        """`generations`: one counter per page, modified here and read by peers (often in shared memory)."""
        self.generations = generations
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: recently used pages are still in the CPU's cache
        self._num_holders = [0] * num_pages  # page |-> number of holders
        self._key: list[PageKey | None] = [None] * num_pages  # page |-> its key
        self._page: dict[PageKey, int] = {}  # key |-> the page that has it
        self._cached = self.order = EvictionOrder() if order is None else order
        self._has_draft = [False] * num_pages  # page |-> the draft model's KV is complete too
        self.watchers: list[KeyWatcher] = []

    @property
    def num_pages(self) -> int:
        return len(self._num_holders)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_spare(self) -> int:
        """Free and cached pages: those that `allocate` can give out."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_spare

    def allocate(self, count: int) -> list[int]:
        """Give out `count` pages, free ones first; NoRoomError, and no page, if there are too few."""
        if count > self.num_spare:
            raise NoRoomError(f"{count} pages wanted, {self.num_spare} of {self.num_pages} can be given out")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
            self._has_draft[page] = False
            self.generations[page] += 1
        return pages

    def _evict(self) -> int:
        page = self._cached.take_next()
        key = self._key[page]
        assert key is not None
        del self._page[key]
        self._key[page] = None
        for watcher in self.watchers:
            watcher.lose(key, page)
        return page

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """The cached or held pages of the leading keys. Does not hold them."""
        pages = []
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def can_take(self, found: Sequence[int], count: int) -> bool:
        """Whether `count` pages can be allocated after `hold(found)`."""
        return self.num_spare - sum(page in self._cached for page in found) >= count

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to held or cached pages. ValueError for a free page: a bug."""
        for page in pages:
            if not self._num_holders[page] and page not in self._cached:
                raise ValueError(f"page {page} is to be held but is free")
            self._cached.take(page)
            self._num_holders[page] += 1

    def release(self, pages: Sequence[int], retention: Retention | None = None) -> None:
        """Remove a holder from a sequence's pages. ValueError for a page without one: a bug.

        The last page becomes the oldest, so that a page is evicted before the pages it continues.
        """
        for page in reversed(pages):
            if not self._num_holders[page]:
                raise ValueError(f"page {page} is released but nothing holds it")
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                if self._key[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = 0.0
        if retention is not None:
            self._cached.keep({page: at for at, page in enumerate(pages) if self._key[page] is not None}, retention)

    def name(self, page: int, key: PageKey) -> None:
        """A held page is complete. If another page already has this key, `find` keeps returning that one."""
        if self._key[page] is None and self._page.setdefault(key, page) == page:
            self._key[page] = key
            for watcher in self.watchers:
                watcher.gain(key, page)

    def has_draft(self, page: int) -> bool:
        return self._has_draft[page]

    def mark_draft(self, page: int) -> None:
        """The draft model's KV of this page is complete."""
        self._has_draft[page] = True

    def check(self, held: Iterable[int] | None = None) -> None:
        """Check that every page is free, held or cached, and, if `held` is given, held as often as it occurs there."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is free twice")
        for page, num in enumerate(self._num_holders):
            if (page in free) + (num > 0) + (page in self._cached) != 1:
                raise AssertionError(f"page {page} is not one of free, held and cached")
            key = self._key[page]
            if page in self._cached and key is None:
                raise AssertionError(f"page {page} is cached without a key")
            if key is not None and (page in free or self._page.get(key) != page):
                raise AssertionError(f"page {page} has a key by which it is not found")
        if len(self._page) != sum(key is not None for key in self._key):
            raise AssertionError("a key leads to a page that does not have it")
        if held is not None:
            found = Counter(held)
            for page, num in enumerate(self._num_holders):
                if num != found[page]:
                    raise AssertionError(f"page {page} counts {num} holders, {found[page]} know of it")
