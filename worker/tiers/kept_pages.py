"""Evicts those pages last that are likely to be wanted again: as requests say, within a share for each owner. Pure.

A page counts as used when its last holder released it, or at the end of its hint if that is later. The page whose use
is longest ago goes first. A sequence's first pages have no earlier end than those behind them, so that a chain is
evicted from its end.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from wire.retention import ALL_TOKENS, Retention
from worker.prefix_cache import EvictionOrder

AWAIT_S = 12.0  # for so long others wait, at most, rather than evict what a session has left: it may wait in the queue
OWNER_SHARE = 0.5  # of a pool: no owner keeps others' pages from it


@dataclass(slots=True, eq=False)
class _Hint:
    """The wish of one request for some of its pages."""

    owner: str
    since: float
    until: float
    awaited_until: float
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict)  # cached ones, next to evict first
    num_pages: int = 0  # whose hint it is, held ones too

    @property
    def is_kept(self) -> bool:
        """Within its owner's share."""
        return self.until > self.since


class KeptPages(EvictionOrder):
    """The cached pages of one pool. Those without a hint are in the dict itself, with their time of release."""

    def __init__(
        self, num_pages: int, page_tokens: int, clock: Callable[[], float], share: float = OWNER_SHARE
    ) -> None:
        super().__init__()
        self._num_pages, self._page_tokens, self._clock = num_pages, page_tokens, clock
        self._most = max(int(share * num_pages), 1)
        self._hints: dict[int, _Hint] = {}  # page |-> its hint
        self._owners: dict[str, dict[_Hint, None]] = {}  # those that count for it; none is empty
        self._ends: list[tuple[float, int, _Hint]] = []  # a heap; without the one of each hint that has cached pages
        self._num_ends = 0  # ever: orders equal ends
        self._num_hinted = 0  # cached pages with a hint

    def __len__(self) -> int:
        return super().__len__() + self._num_hinted

    def __contains__(self, page: object) -> bool:
        return super().__contains__(page) or self._is_hinted(page)

    def _is_hinted(self, page: object) -> bool:
        hint = self._hints.get(page)  # type: ignore[call-overload]
        return hint is not None and page in hint.pages

    def __setitem__(self, page: int, _: float) -> None:
        """It is cached from now on."""
        now, hint = self._clock(), self._hints.get(page)
        if hint is not None and hint.until <= now:
            self._forget(page)
            hint = None
        if hint is None:
            super().__setitem__(page, now)
        else:
            self._insert(page, hint)

    def _insert(self, page: int, hint: _Hint) -> None:
        hint.pages[page] = None
        self._num_hinted += 1
        if len(hint.pages) == 1:
            self._push(hint)

    def _push(self, hint: _Hint) -> None:
        if len(self._ends) > 2 * self._num_pages:
            self._ends = [end for end in self._ends if end[2].pages and end[0] == end[2].until]
            heapify(self._ends)
        self._num_ends += 1
        heappush(self._ends, (hint.until, self._num_ends, hint))

    def take(self, page: int) -> None:
        """It is cached no more; a hint stays."""
        if self._is_hinted(page):
            del self._hints[page].pages[page]
            self._num_hinted -= 1
        else:
            super().take(page)

    def take_next(self) -> int:
        while self._ends and (not self._ends[0][2].pages or self._ends[0][0] != self._ends[0][2].until):
            heappop(self._ends)
        oldest = next(iter(self.items()), None)
        if self._ends and (oldest is None or self._ends[0][0] < oldest[1]):
            page = next(iter(self._ends[0][2].pages))
            self.take(page)
            self._forget(page)
            return page
        return super().take_next()

    def _forget(self, page: int) -> None:
        """It has no hint any more, and is not cached."""
        hint = self._hints.pop(page)
        hint.num_pages -= 1
        if not hint.num_pages:
            self._disown(hint)

    def _disown(self, hint: _Hint) -> None:
        mine = self._owners.get(hint.owner, {})
        mine.pop(hint, None)
        if not mine:
            self._owners.pop(hint.owner, None)

    def keep(self, pages: Mapping[int, int], retention: Retention) -> None:
        """Later ends replace earlier ones. Of too many pages the first are kept."""
        now, owner = self._clock(), retention.owner
        first = list(pages.items())[: self._most]
        hints: dict[float, _Hint] = {}
        for page, at in reversed(first):
            seconds = self._find_seconds(retention, at)
            hint = hints.setdefault(seconds, _Hint(owner, now, now + seconds, now + min(seconds, AWAIT_S)))
            before = self._hints.get(page)
            if not seconds or (before is not None and before.until >= hint.until):
                continue
            is_cached = page in self
            if is_cached:
                self.take(page)
            if before is not None:
                self._forget(page)
            self._hints[page] = hint
            hint.num_pages += 1
            if is_cached:
                self._insert(page, hint)
        mine = self._owners.setdefault(owner, {})
        mine.update(dict.fromkeys(hint for hint in hints.values() if hint.num_pages))
        while self._count_kept(mine) > self._most:
            self._lapse(min((hint for hint in mine if hint.is_kept), key=lambda hint: hint.until))
        if not mine:
            self._owners.pop(owner, None)

    def count_awaited(self, found: Sequence[int], count: int, retention: Retention | None = None) -> int:
        """Those of sessions that were here just now: all of its owner's for a session, of the others' a share.

        None where that leaves too little for `count`. `retention`: of what needs them.
        """
        if count > self._num_pages - self._most:
            return 0
        now, own = self._clock(), Counter(self._hints[page] for page in found if self._is_hinted(page))
        num_awaited = {
            owner: sum(len(hint.pages) - own[hint] for hint in mine if now < hint.awaited_until)
            for owner, mine in self._owners.items()
        }
        is_session = retention is not None and any(part.tokens == ALL_TOKENS for part in retention.parts)
        num_mine = num_awaited.pop(retention.owner, 0) if retention and is_session else 0
        return num_mine + sum(min(num, self._most) for num in num_awaited.values())

    def _count_kept(self, hints: Iterable[_Hint]) -> int:
        return sum(hint.num_pages for hint in hints if hint.is_kept)

    def _find_seconds(self, retention: Retention, at: int) -> float:
        end = (at + 1) * self._page_tokens
        return max((part.seconds for part in retention.parts if end <= part.tokens), default=0.0)

    def _lapse(self, hint: _Hint) -> None:
        """Its owner has too many: its pages count as used when they were."""
        hint.until = hint.since
        if hint.pages:
            self._push(hint)

    def check(self) -> None:
        """Check the counts, and that each owner has its share at most."""
        cached = [page for page, hint in self._hints.items() if page in hint.pages]
        if len(cached) != self._num_hinted or any(page in self._hints for page in self.keys()):
            raise AssertionError("a cached page is counted wrongly, or twice")
        for hint in set(self._hints.values()):
            if hint.num_pages != sum(one is hint for one in self._hints.values()):
                raise AssertionError("a hint counts its pages wrongly")
        for owner, mine in self._owners.items():
            if not mine or self._count_kept(mine) > self._most:
                raise AssertionError(f"{owner} keeps more than its share, or nothing")
