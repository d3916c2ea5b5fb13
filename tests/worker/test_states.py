"""Slots of state: where checkpoints are kept, found and handed over; and that every step reads its own state."""

import os
from collections import deque
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import sequence_params as make
from tests.support.sequence_params import answer, awaited, finish, pack, plan, prompt, receive, run, text_of
from wire.page_keys import page_keys, root_key
from worker.prefix_cache import NoRoomError, PrefixCache, num_pages_for
from worker.receiving import OfferRefusedError, begin_read, fail_read, finish_read
from worker.scheduler import Scheduler
from worker.sequences import Phase, ScheduledSequence, Sequence
from worker.states import MOST_SLOTS, StateSlots, choose_spacing

PAGE, SPACING = 4, 12


def build(num_pages: int = 60, num_slots: int = 60, max_running: int = 8) -> tuple[Scheduler, StateSlots]:
    scheduler, _ = make.build_scheduler(num_pages, PAGE, max_running)
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


@pytest.mark.parametrize(("num_prompt", "num_slots"), [(3, 1), (5, 1), (9, 1), (4, 1), (11, 2)])
def test_a_hand_over_brings_the_state_and_the_last_checkpoint(num_prompt: int, num_slots: int) -> None:
    (prefill, _), (decode, _) = build(), build()
    source = prefill.admit(prompt(1, num_prompt, first=7), 0.0, is_kept=True)
    target = decode.admit(awaited(1, num_prompt, 2, first=7), 0.0)
    while source.num_missing:
        assert prefill.kv.states_of(source, range(source.computed)) == []
        finish(prefill, plan(prefill, 6))
    slots = prefill.kv.states_of(source, range(source.computed))
    assert len(slots) == len(set(slots)) == num_slots
    receive(decode, target, num_slots=num_slots)
    prefill.end(source)
    run(decode)
    for scheduler in (prefill, decode):
        again = scheduler.admit(answer(2, num_prompt, 1, first=7), 0.0)
        assert again.num_cached == (num_prompt - 1) // PAGE * PAGE


def test_an_offer_without_its_state_is_refused() -> None:
    scheduler, _ = build()
    sequence = scheduler.admit(awaited(1, 11, 2), 0.0)
    for end, num_slots in ((8, 1), (10, 0), (10, 3)):
        with pytest.raises(OfferRefusedError, match=rf"{num_slots} states offered with \[0, {end}\) of \[0, 10\)"):
            begin_read(scheduler, sequence.id, sequence.params.attempt, 0, end, num_pages_for(end, PAGE), num_slots)
    assert begin_read(scheduler, sequence.id, sequence.params.attempt, 0, 8, 2, 0)[1] == []


def test_a_preempted_sequence_continues_at_a_checkpoint_once_there_are_slots() -> None:
    scheduler, states = build(num_pages=9, num_slots=8)
    scheduler.admit(answer(1, 3, 30), 0.0)
    new = scheduler.admit(answer(2, 15, 12), 0.0)
    while not new.num_preemptions:
        finish(scheduler, plan(scheduler, 99))
    assert not new.state.held
    taken = states.cache.allocate(states.cache.num_spare - 1)
    scheduler.abort("g", [1])
    states.cache.release(taken[:-1])
    finish(scheduler, plan(scheduler, 99))
    assert new.phase is Phase.ACTIVE and new.launched >= 12


def test_spacing_is_in_whole_pages_and_never_short() -> None:
    assert [choose_spacing(*sizes) for sizes in ((1, 100, 16), (4100, 100, 16), (1, 100, 100))] == [512, 41 * 16, 600]


class Device:
    """A scheduler, and slots that a launched step reads and writes at once, whatever becomes of it later."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.is_ample = rng.random() < 0.3  # no checkpoint is evicted
        num_slots = 600 if self.is_ample else rng.randint(4, 14)
        self.scheduler, self.states = build(rng.randint(15, 20), num_slots, max_running=4)
        self.slots: list[tuple[int, ...] | None] = [None] * num_slots  # tokens seen; None: a failed step wrote it
        self.steps_ahead = rng.randint(0, 1)
        self.flights: deque[list[tuple[ScheduledSequence, bool]]] = deque()  # each step, and whether it fails
        self.reads: list[tuple[Sequence, int, list[int]]] = []  # with the end of the offer and its slots
        self.ended: list[Sequence] = []  # whose last full page must have a checkpoint
        self.texts: list[tuple[int, ...]] = [()]  # of earlier sequences

    def admit(self) -> None:
        begin = self.rng.choice(self.texts)[: self.rng.choice([4, 8, 13, 30])]
        tokens = (*begin, *(self.rng.randrange(2) for _ in range(self.rng.randint(1, 9))))
        name, packed = (len(self.texts), len(tokens)), pack(tokens)
        params = self.rng.choice([answer, awaited])(*name, self.rng.randint(1, 20), prompt=packed)
        if self.rng.random() < 0.3:
            params = prompt(*name, prompt=packed)
        with suppress(NoRoomError):
            self.texts.append(tuple(self.scheduler.admit(params, 0.0, is_kept=not params.max_tokens).tokens))

    def step(self) -> None:
        """As the loop of a worker does."""
        planned = plan(self.scheduler, self.rng.randint(1, 9))
        if self.flights and (self.scheduler.is_short or self.rng.random() < 0.1):
            while planned:
                self.scheduler.drop_step(planned.pop())
        if planned:
            self.flights.append([])
            for one in planned:
                self.flights[-1].append((one, self.launch(one)))
        while len(self.flights) > (self.steps_ahead if planned else 0):
            self.collect()
        for one, _ in self.flights[-1] if self.flights else ():
            if one.wants_token and one.sequence.phase is not Phase.ENDED and self.rng.random() < 0.1:
                self.scheduler.take_back(one)  # its mask was late

    def launch(self, one: ScheduledSequence) -> bool:
        (source, target), text = one.slots, text_of(one.sequence)
        is_failing = self.is_failing(one.sequence)
        assert is_failing or (self.slots[source] if source >= 0 else ()) == text[: one.begin]
        is_failing |= self.rng.random() < 0.05
        self.slots[target] = None if is_failing else text[: one.begin + one.count]
        return is_failing

    def is_failing(self, sequence: Sequence) -> bool:
        launched = [one for flight in self.flights for one, fails in flight if fails and not one.is_dropped]
        return any(one.sequence is sequence for one in launched)

    def collect(self) -> None:
        for one, fails in self.flights.popleft():
            if one.is_dropped:
                self.scheduler.end_step(one)
            elif fails:
                self.scheduler.fail_step(one, ValueError("the device failed"), 0.0)
            elif any(update.finish_reason for update in finish(self.scheduler, [one])):
                self.texts.append(tuple(one.sequence.tokens))
                self.ended.append(one.sequence)

    def offer(self) -> None:
        """Another worker offers the next page, or everything."""
        for sequence in [one for one in self.scheduler.in_phase(Phase.RECEIVING) if not one.is_read]:
            begin, limit = sequence.computed, sequence.params.end
            end = self.rng.choice([min(begin + PAGE, limit), limit])
            counts = num_pages_for(end - begin, PAGE), len(stops_of(sequence)) if end == limit else 0
            read = begin_read(self.scheduler, sequence.id, sequence.params.attempt, begin, end, *counts)
            self.reads.append((sequence, end, read[1]))

    def end_reads(self) -> None:
        for sequence, end, slots in self.reads:
            is_good = self.rng.random() < 0.9
            for slot, stop in zip(slots, stops_of(sequence), strict=bool(slots)):
                self.slots[slot] = text_of(sequence)[:stop] if is_good else None
            if is_good:
                finish_read(self.scheduler, sequence.id, end, 0.0, len(slots))
            else:
                fail_read(self.scheduler, sequence.id)
        self.reads.clear()

    def end_prompts(self) -> None:
        """Runs end after the last offer."""
        for sequence in self.scheduler:
            is_ended, is_whole = sequence.phase is Phase.ENDED, sequence.computed == sequence.params.end
            if sequence.is_kept and is_whole and not is_ended and sequence.computed:
                offered = [self.slots[slot] for slot in self.scheduler.kv.states_of(sequence, range(sequence.computed))]
                expected = [text_of(sequence)[:stop] for stop in stops_of(sequence)]
                assert offered == (expected if self.is_ample else expected[: max(len(offered), 1)])
                self.ended.append(sequence)
            if sequence.is_kept and (is_ended or is_whole):
                self.scheduler.end(sequence)

    def stop(self) -> None:
        """An abort, or a preemption as if pages were short."""
        answers = [sequence for sequence in self.scheduler.in_phase(Phase.ACTIVE) if sequence.params.max_tokens]
        if answers and not self.scheduler.num_launched and self.rng.random() < 0.5:
            self.scheduler._preempt(answers[-1])
        else:
            self.scheduler.abort("g", [self.rng.randint(0, len(self.texts))])

    def check(self) -> None:
        self.scheduler.check()
        for sequence in self.scheduler:
            state, text = sequence.state, text_of(sequence)
            if not state.held or sequence.phase is Phase.ENDED or self.is_failing(sequence):
                continue
            assert len(state.held) <= MOST_SLOTS + 1 + len(state.retired)
            assert state.source >= 0 or not sequence.launched or sequence.phase is Phase.RECEIVING
            assert state.source < 0 or self.slots[state.source] == text[: sequence.launched]
            assert state.checkpoint < 0 or self.slots[state.checkpoint] == text[: state.checkpoint_at]
        for key, slot in self.states.cache._page.items():
            seen = self.slots[slot] or ()
            assert len(seen) % PAGE == 0 and [*page_keys(root_key("model", ""), pack(seen), PAGE)][-1] == key
        for sequence in self.ended if self.is_ample else ():
            whole = sequence.num_known // PAGE
            assert sequence.state.held or self.states.find(sequence.keys[:whole])[0] == whole


def stops_of(sequence: Sequence) -> list[int]:
    """Positions after which another worker offers the state."""
    end = sequence.params.end
    return [end, *([end // PAGE * PAGE] if end % PAGE and end > PAGE else [])]


@settings(max_examples=int(os.environ.get("TEST_EXAMPLES", "150")), deadline=None)
@given(st.integers(0, 2**32))
def test_every_step_reads_its_own_state_and_every_checkpoint_is_that_of_its_key(seed: int) -> None:
    device = Device(Random(seed))
    chances = {"admit": 3, "step": 8, "offer": 2, "end_reads": 2, "end_prompts": 1, "stop": 2}
    events = device.rng.choices([*chances], [*chances.values()], k=80)
    for event in [*events, *["step", "offer", "end_reads", "end_prompts"] * 1000]:  # no deadlock
        if event == "admit" or len(device.scheduler):
            getattr(device, event)()
            device.check()
    assert device.states.cache.num_held == device.scheduler.kv.cache.num_held == len(device.scheduler) == 0
