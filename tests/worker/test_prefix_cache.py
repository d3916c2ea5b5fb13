"""The prefix cache by example; for its use under load see the simulator and the scheduler's tests."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.page_keys import next_key, root_key
from worker.prefix_cache import NoRoomError, PrefixCache

KEYS = [bytes([i]) * 16 for i in range(6)]


def test_a_cached_page_keeps_its_generation_until_it_is_given_out_anew() -> None:
    generations = [0, 0]
    cache = PrefixCache(2, generations)
    (page,) = cache.allocate(1)
    cache.name(page, KEYS[0])
    cache.mark_draft(page)
    cache.release([page])
    assert (cache.num_cached, cache.num_spare, cache.num_held) == (1, 2, 0)
    assert cache.find(KEYS) == [page]
    cache.hold([page])
    cache.release([page])
    assert generations[page] == 1
    (other,) = cache.allocate(1)
    assert other != page, "free pages go first"
    assert cache.allocate(1) == [page]
    assert generations[page] == 2
    assert cache.find(KEYS) == [] and not cache.has_draft(page)


def test_of_two_pages_with_one_key_the_first_is_found_and_a_page_keeps_its_first_key() -> None:
    cache = PrefixCache(3, [0] * 3)
    first, second = cache.allocate(2)
    for page, key in ((first, KEYS[0]), (second, KEYS[0]), (first, KEYS[1])):
        cache.name(page, key)
    cache.release([second])
    assert cache.num_cached == 0, "the second one is free: no lookup would find it"
    cache.release([first])
    assert (cache.find(KEYS[:1]), cache.find(KEYS[1:])) == ([first], [])
    assert cache.can_take([first], 2) and not cache.can_take([first], 3), "a page that is found is not free"
    with pytest.raises(NoRoomError, match="4 pages wanted, 3 of 3"):
        cache.allocate(4)
    with pytest.raises(ValueError, match="is to be held but is free"):
        cache.hold([second])
    with pytest.raises(ValueError, match="nothing holds it"):
        cache.release([first])


@settings(max_examples=200)
@given(
    st.integers(3, 8),
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 3)), max_size=25),
)
def test_a_page_is_evicted_before_the_pages_it_follows_on(num_pages: int, lives: list[tuple[list[int], int]]) -> None:
    cache = PrefixCache(num_pages, [0] * num_pages)
    chains: dict[bytes, bytes] = {}  # key |-> its parent
    root = root_key("model", "")
    running: list[list[int]] = []
    for prompt, which in lives:
        keys = [root]
        for token in prompt:
            keys.append(next_key(keys[-1], bytes([token])))
        chains.update((key, parent) for parent, key in pairwise(keys))
        found = cache.find(keys[1:])
        while not cache.can_take(found, len(prompt) - len(found)) and running:
            cache.release(running.pop(which % len(running)))
            found = cache.find(keys[1:])
        if not cache.can_take(found, len(prompt) - len(found)):
            continue
        cache.hold(found)
        pages = found + cache.allocate(len(prompt) - len(found))
        for page, key in zip(pages, keys[1:], strict=True):
            cache.name(page, key)
        running.append(pages)
        if len(running) > 3:
            cache.release(running.pop(which))
        cache.check(page for pages in running for page in pages)
        for key, parent in chains.items():
            if cache.find([key]):
                assert parent == root or cache.find([parent]), "a page outlived the page before it"


def test_check_finds_pages_in_no_state_or_two_and_holders_that_are_not_there() -> None:
    twice_free, lost, twice, good = (PrefixCache(2, [0, 0]) for _ in range(4))
    twice_free._free.append(0)
    lost._free.pop()
    twice._cached[0] = None
    with pytest.raises(AssertionError, match="free twice"):
        twice_free.check()
    for cache in (lost, twice):
        with pytest.raises(AssertionError, match="not one of free, held and cached"):
            cache.check()
    (page,) = good.allocate(1)
    good.check([page])
    for wrong in ([page, page], [], [page, 1 - page]):
        with pytest.raises(AssertionError, match="holders"):
            good.check(wrong)
