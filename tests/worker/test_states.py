"""Slots of state: where checkpoints are kept, found and handed over; and that every step reads its own state."""

import pytest

from tests.support import sequence_params as make
from tests.support.sequence_params import answer, awaited, finish, pack, plan, receive, run
from worker.prefix_cache import NoRoomError, PrefixCache, num_pages_for
from worker.receiving import OfferRefusedError, begin_read
from worker.scheduler import Scheduler
from worker.sequences import Phase
from worker.states import StateSlots, choose_spacing

PAGE, SPACING = 4, 12


def build(num_pages: int = 60, num_slots: int = 60, max_running: int = 8) -> tuple[Scheduler, StateSlots]:
    scheduler = make.build_scheduler(num_pages, PAGE, max_running)
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
        with pytest.raises(OfferRefusedError, match=rf"{num_slots} states offered with \[0, {end}\) of \[0, 10\)"):
            begin_read(scheduler, sequence.id, sequence.params.attempt, 0, end, num_pages_for(end, PAGE), num_slots)
    assert begin_read(scheduler, sequence.id, sequence.params.attempt, 0, 8, 2, 0)[1] == []


def test_spacing_is_in_whole_pages_and_never_short() -> None:
    assert [choose_spacing(*sizes) for sizes in ((1, 100, 16), (4100, 100, 16), (1, 100, 100))] == [512, 41 * 16, 600]
