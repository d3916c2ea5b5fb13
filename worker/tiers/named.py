"""Pages that got keys and are not saved yet. Pure."""

from collections.abc import Callable
from itertools import islice

from wire.page_keys import NamedPage, PageKey
from worker.prefix_cache import PrefixCache


class NamedPages:
    """Those of one cache, oldest first. The caller serialises calls with the cache's."""

    def __init__(self, cache: PrefixCache, on_named: Callable[[], object]) -> None:
        """`on_named`: called when `take` has something again."""
        self._cache = cache
        self._on_named = on_named
        self._keys: dict[int, PageKey] = {}  # page |-> its key
        cache.watchers.append(self)

    def gain(self, key: PageKey, page: int) -> None:
        was_empty = not self._keys
        self._keys[page] = key
        if was_empty:
            self._on_named()

    def lose(self, key: PageKey, page: int) -> None:
        self._keys.pop(page, None)

    def take(self, limit: int) -> list[NamedPage]:
        """At most so many that got keys since they were last taken, and still have them."""
        pages = list(islice(self._keys, limit))
        generations, has_draft = self._cache.generations, self._cache.has_draft
        return [NamedPage(page, int(generations[page]), self._keys.pop(page), has_draft(page)) for page in pages]
