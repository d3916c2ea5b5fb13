"""Which cached page is evicted next where requests say how long theirs are worth keeping."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.combinations import examples
from tests.support.sequence_params import answer, run
from wire.retention import ALL_TOKENS, KeptPart, Retention
from worker.kv_cache import KVCacheManager
from worker.prefix_cache import NoRoomError, PrefixCache
from worker.scheduler import Scheduler
from worker.tiers.kept_pages import AWAIT_S, KeptPages

PAGE = 4
NUM_PAGES = 12


class Cache:
    """A prefix cache at a time of its own, whose pages all have keys."""

    def __init__(self, share: float = 1.0) -> None:
        self.now = 0.0
        self.order = KeptPages(NUM_PAGES, PAGE, lambda: self.now, share)
        self.cache = PrefixCache(NUM_PAGES, [0] * NUM_PAGES, self.order)
        self._num_keys = 0

    def allocate(self, count: int) -> list[int]:
        pages = self.cache.allocate(count)
        for page in pages:
            self._num_keys += 1
            self.cache.name(page, self._num_keys.to_bytes(16, "big"))
        return pages

    def release(self, pages: Sequence[int], *parts: tuple[int, float], owner: str = "") -> None:
        self.cache.release(pages, Retention(owner, [KeptPart(*part) for part in parts]) if parts else None)
        self.order.check()

    def evict(self, count: int = NUM_PAGES) -> list[int]:
        """The next so many in order, for ever."""
        return [self.cache.allocate(1)[0] for _ in range(count)]


def test_pages_with_a_hint_go_when_it_is_over() -> None:
    cache = Cache()
    kept, plain, late = (cache.allocate(4) for _ in range(3))
    cache.release(kept, (ALL_TOKENS, 10.0))
    cache.release(plain)
    cache.now = 20.0
    cache.release(late)
    assert cache.evict() == [*reversed(plain), *reversed(kept), *reversed(late)]


def test_a_marked_beginning_outlives_the_rest_although_another_holder_marks_nothing() -> None:
    cache = Cache()
    pages, others = cache.allocate(6), cache.allocate(6)
    cache.cache.hold(pages)
    cache.release(pages, (2 * PAGE + 1, 100.0), (5 * PAGE, 10.0))
    cache.now = 1.0
    cache.release(pages)
    cache.now = 5.0
    cache.release(others)
    assert cache.evict() == [pages[5], *reversed(others), *(pages[at] for at in (4, 3, 2, 1, 0))]


def test_no_owner_keeps_more_than_its_share() -> None:
    cache = Cache(share=0.5)
    first, second, plain = (cache.allocate(4) for _ in range(3))
    cache.release(first, (ALL_TOKENS, 50.0), owner="one")
    cache.release(second, (ALL_TOKENS, 99.0), owner="one")  # eight of twelve: the first ones have the earlier end
    cache.now = 1.0
    cache.release(plain)
    assert cache.evict() == [*reversed(first), *reversed(plain), *reversed(second)]


def test_of_a_sequence_beyond_the_share_the_beginning_is_kept() -> None:
    cache = Cache(share=0.5)
    pages, plain = cache.allocate(9), cache.allocate(3)
    cache.release(pages, (ALL_TOKENS, 50.0), owner="one")
    cache.now = 1.0
    cache.release(plain)
    assert cache.evict() == [*reversed(pages[6:]), *reversed(plain), *reversed(pages[:6])]


def test_an_answer_waits_rather_than_evict_what_a_session_has_just_left_but_not_for_long() -> None:
    now = 0.0
    order = KeptPages(NUM_PAGES, PAGE, lambda: now)
    scheduler = Scheduler(KVCacheManager(PrefixCache(NUM_PAGES, [0] * NUM_PAGES, order), PAGE, "model"), 8, 10.0)
    retention = Retention("", [KeptPart(ALL_TOKENS, 60.0)])
    first = answer(1, 4 * PAGE, 3, retention=retention)
    scheduler.admit(first, now)
    run(scheduler)
    assert order.count_awaited([], 4) == 4 and scheduler.kv.cache.num_held == 0
    scheduler.admit(answer(2, 3 * PAGE, 2), now)
    with pytest.raises(NoRoomError, match="5 pages are needed, 4 are spare"):
        scheduler.admit(answer(3, 5 * PAGE, 0, gateway="other"), now)
    again = scheduler.admit(answer(4, 4 * PAGE, 3, first=10_001), now)
    assert again.num_cached == 3 * PAGE, "its own pages are for it"
    scheduler.abort("g", [4])
    now = AWAIT_S
    assert scheduler.admit(answer(3, 5 * PAGE, 0, gateway="other"), now)
    assert order.count_awaited([], NUM_PAGES // 2 + 1) == 0, "whoever needs more than is left to others"


def test_what_was_just_left_is_awaited_by_its_owner_beyond_the_share_and_by_others_within_it() -> None:
    cache = Cache(share=0.5)
    for _ in range(2):
        cache.release(cache.allocate(5), (ALL_TOKENS, 60.0), owner="one")
    count, found = cache.order.count_awaited, cache.cache.find([(1).to_bytes(16, "big")])
    one, two = (Retention(owner, [KeptPart(ALL_TOKENS, 9.0)]) for owner in ("one", "two"))
    assert count([], 2, one) == 10 and count(found, 2, one) == 9
    assert count([], 2) == count([], 2, two) == 6, "half of the pool"
    assert count([], 2, Retention("one", [KeptPart(PAGE, 9.0)])) == 6, "no session's"
    cache.now = AWAIT_S
    assert count([], 2, one) == 0


def test_a_prompt_waits_too_where_nothing_is_answered() -> None:
    order = KeptPages(NUM_PAGES, PAGE, lambda: 0.0)
    scheduler = Scheduler(KVCacheManager(PrefixCache(NUM_PAGES, [0] * NUM_PAGES, order), PAGE, "model"), 8, 10.0)
    kept = Retention("", [KeptPart(ALL_TOKENS, 60.0)])
    for number in (1, 2):
        scheduler.admit(answer(number, 5 * PAGE + 1, 0, first=100 * number, retention=kept), 0.0)
        run(scheduler)
        scheduler.end(scheduler[number])
    assert order.count_awaited([], 4, kept) == 10
    with pytest.raises(NoRoomError, match="4 pages are needed, 2 are spare"):
        scheduler.admit(answer(3, 4 * PAGE, 0, first=900, retention=kept), 0.0)
    again = scheduler.admit(answer(4, 6 * PAGE, 0, first=100, retention=kept), 0.0)
    assert again.num_cached == 5 * PAGE, "its own pages are for it"


ACT = st.tuples(
    st.sampled_from(["open", "close", "share", "wait"]), st.integers(0, 4), st.sampled_from([0.0, 3.0, 20.0]),
    st.integers(0, 20), st.sampled_from(["a", "b"]),
)  # fmt: skip


@settings(max_examples=examples(300))
@given(st.lists(ACT, max_size=60), st.sampled_from([1.0, 0.4]))
def test_the_page_goes_whose_use_is_longest_ago(acts: list[tuple[str, int, float, int, str]], share: float) -> None:
    """By the plain definition, page by page, where shares do not bind; counts are right where they do."""
    cache = Cache(share)
    used: dict[int, float] = {}  # page |-> when it counts as used
    held: list[list[int]] = []
    for kind, count, seconds, tokens, owner in acts:
        if kind == "open" and count <= cache.cache.num_spare:
            cached = {page for page in range(NUM_PAGES) if page in cache.order}
            for page in cache.allocate(count):
                if page in cached and share == 1.0:
                    assert used[page] == min(used[one] for one in cached)
                cached.discard(page)
                used.pop(page, None)
                held.append([page])
        elif kind == "share" and held:
            pages = [page for pages in held[:count] for page in pages]
            cache.cache.hold(pages)
            held.append(pages)
        elif kind == "close" and held:
            pages = list(dict.fromkeys(held.pop(count % len(held))))
            cache.now += 0.001  # no two releases at one time
            cache.release(pages, (tokens, seconds), owner=owner)
            for at, page in enumerate(pages):
                until = cache.now + (seconds if (at + 1) * PAGE <= tokens else 0.0)
                used[page] = max(used.get(page, 0.0), until)
                if page in cache.order:
                    used[page] = max(used[page], cache.now)
        elif kind == "wait":
            cache.now += count
        cache.order.check()
    assert len(cache.order) == len({page for page in range(NUM_PAGES) if page in cache.order})
    cache.cache.check()
