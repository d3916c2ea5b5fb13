"""The prefix cache, and checkpoints of states in it, by example; for both under load see the simulator."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.combinations import examples
from tests.support.sequence_params import answer, awaited, build_scheduler, finish, pack, plan, receive, run
from wire.page_keys import next_key, root_key
from worker.kv_cache import num_pages_for
from worker.prefix_cache import NoRoomError, PrefixCache
from worker.receiving import OfferRefusedError, begin_read
from worker.scheduler import Scheduler
from worker.sequences import Phase
from worker.states.slots import StateSlots, choose_spacing

KEYS = [bytes([i]) * 16 for i in range(6)]


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
    assert first not in cache.allocate(2), "free pages go before cached ones"


@settings(max_examples=examples(200))
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
    twice._cached[0] = 0.0
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


PAGE, SPACING = 4, 12


def build(num_pages: int = 60, num_slots: int = 60, max_running: int = 8) -> tuple[Scheduler, StateSlots]:
    scheduler = build_scheduler(num_pages, PAGE, max_running)
    states = scheduler.kv.states = StateSlots(PrefixCache(num_slots, [0] * num_slots), PAGE, SPACING)
    return scheduler, states


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("max_tokens", [1, 4, 5])
def test_the_next_turn_continues_at_the_last_full_page(num_prompt: int, max_tokens: int, steps_ahead: int) -> None:
    scheduler, states = build()
    first = scheduler.admit(answer(1, num_prompt, max_tokens, first=7), 0.0)
    run(scheduler, 6, steps_ahead)
    turn = scheduler.admit(answer(2, len(first.tokens) + 1, 1, prompt=pack([*first.tokens, 5])), 0.0)
    assert turn.num_cached == turn.computed == (num_prompt + max_tokens - 1) // PAGE * PAGE
    again = scheduler.admit(answer(3, num_prompt, 1, first=7), 0.0)
    assert again.num_cached == (num_prompt - 1) // PAGE * PAGE, "as far as the prompt alone goes"
    assert states.cache.num_held <= 6


def test_a_long_prompt_keeps_checkpoints_by_spacing_and_where_others_branch_off() -> None:
    scheduler, _ = build()
    long = scheduler.admit(answer(1, 31, 1, first=7), 0.0)
    ends = []
    while long.num_missing:
        planned = plan(scheduler, 99)
        ends += [part.begin + part.count for part in planned]
        finish(scheduler, planned)
    assert ends == [12, 24, 28, 31], "spacing twice, the last full page, the prompt's last token"
    begin = [7, *range(1, 22)]
    for handle, cached in ((2, 12), (3, 20), (4, 20)):  # the second one branches off at 20: the first made a checkpoint
        branch = scheduler.admit(answer(handle, 30, 1, prompt=pack([*begin, *[handle] * 8])), 0.0)
        assert branch.num_cached == cached
        run(scheduler)


def test_pages_without_a_checkpoint_are_computed_again_but_not_received_again() -> None:
    scheduler, states = build()
    scheduler.admit(answer(1, 30, 1, first=7), 0.0)
    run(scheduler)
    states.cache.allocate(60)  # evicts all checkpoints
    with pytest.raises(NoRoomError):
        scheduler.admit(answer(2, 30, 1, first=7), 0.0)
    states.cache.release(range(60))
    here = scheduler.admit(answer(3, 30, 1, first=7), 0.0)
    assert (here.phase, here.num_cached) == (Phase.ACTIVE, 0)
    for num_prompt, cached in ((30, 28), (29, 24)):  # the state comes with the last page
        there = scheduler.admit(awaited(num_prompt, num_prompt, 1, first=7), 0.0)
        assert (there.phase, there.num_cached, there.computed) == (Phase.RECEIVING, cached, cached)
        receive(scheduler, there, num_slots=1)
    run(scheduler)
    assert not len(scheduler)


def test_an_offer_without_its_state_is_refused() -> None:
    scheduler, _ = build()
    sequence = scheduler.admit(awaited(1, 11, 2), 0.0)
    for end, num_slots in ((8, 1), (10, 0), (10, 3)):
        reason = rf"{num_slots} recurrent states offered with \[0, {end}\) of \[0, 10\)"
        with pytest.raises(OfferRefusedError, match=reason):
            begin_read(scheduler, sequence.id, sequence.params.attempt, 0, end, num_pages_for(end, PAGE), num_slots)
    assert begin_read(scheduler, sequence.id, sequence.params.attempt, 0, 8, 2, 0)[1] == []


def test_spacing_is_in_whole_pages_and_never_short() -> None:
    assert [choose_spacing(*sizes) for sizes in ((1, 100, 16), (4100, 100, 16), (1, 100, 100))] == [512, 41 * 16, 600]
