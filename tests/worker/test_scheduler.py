"""The scheduler by example: the prefix cache, the draft model's KV, steps ahead, offers, refusals, timing."""

from dataclasses import replace

import pytest

from decode_worker.speculation.speculator import most_drafts
from tests.support.sequence_params import (
    LEASE_S,
    answer,
    awaited,
    build_scheduler,
    finish,
    plan,
    prompt,
    receive,
    run,
    step,
    token_at,
)
from wire.logprobs import TokenLogprobs
from worker.kv_cache import KVCacheManager
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.receiving import OfferRefusedError, begin_read, expire, fail_read, finish_read, next_deadline
from worker.scheduler import Scheduler, num_rows_for
from worker.sequences import Phase


def test_an_equal_prompt_finds_whole_pages_at_admission() -> None:
    scheduler, generations = build_scheduler(num_pages=20, page_tokens=4)
    first = scheduler.admit(answer(1, 11, 2, first=7), 0.0)
    assert (first.num_cached, scheduler.kv.num_queried, scheduler.kv.num_hit) == (0, 10, 0)
    run(scheduler)
    before = list(generations)
    again = scheduler.admit(answer(2, 11, 2, first=7, local_prefill_max_tokens=2), 0.0)
    assert (again.num_cached, again.computed, again.launched) == (8, 8, 8)
    assert (scheduler.kv.num_queried, scheduler.kv.num_hit) == (20, 8)
    assert again.phase is Phase.ACTIVE, "two positions are missing, the limit for computing here"
    assert sum(old != new for old, new in zip(before, generations, strict=True)) == 1, "only the third page is new"
    (planned,) = plan(scheduler, 99)
    assert (planned.begin, planned.count, planned.wants_token) == (8, 3, True)


@pytest.mark.parametrize(
    ("length", "local", "cached", "phase"),
    [
        (9, 0, 8, Phase.ACTIVE),  # nothing is missing
        (12, 0, 8, Phase.ACTIVE),  # 3 positions: less than a page, no hand-off
        (13, 0, 8, Phase.RECEIVING),  # 4: a page
        (13, 4, 8, Phase.ACTIVE),
        (14, 4, 8, Phase.RECEIVING),
        (4, 0, 0, Phase.RECEIVING),  # 3, with nothing cached: the prompt is too short
        (1, 0, 0, Phase.ACTIVE),
    ],
)
def test_what_is_missing_behind_cached_pages_decides_who_computes_it(
    length: int, local: int, cached: int, phase: Phase
) -> None:
    scheduler, _ = build_scheduler(num_pages=40, page_tokens=4)
    scheduler.admit(answer(1, 9, 1, first=7), 0.0)
    run(scheduler)
    sequence = scheduler.admit(awaited(2, length, 1, first=7, local_prefill_max_tokens=local), 0.0)
    assert (sequence.num_cached, sequence.phase) == (cached, phase)


def test_salts_models_and_first_pages_keep_prompts_apart() -> None:
    scheduler, _ = build_scheduler(num_pages=60, page_tokens=4)
    requests = [
        answer(1, 9, 1, first=7), answer(2, 9, 1, first=7, cache_salt="s"), answer(3, 9, 1, first=8),
        answer(4, 9, 1, first=7, cache_salt="t"), answer(5, 9, 1, first=7), answer(6, 9, 1, first=7, cache_salt="s"),
    ]  # fmt: skip
    found = []
    for params in requests:
        found.append(scheduler.admit(params, 0.0).num_cached)
        run(scheduler)
    assert found == [0, 0, 0, 0, 8, 8]
    other = Scheduler(KVCacheManager(scheduler.kv.cache, 4, "another model"), 8, LEASE_S)
    assert other.admit(answer(1, 9, 1, first=7), 0.0).num_cached == 0


def test_a_page_has_no_key_before_its_kv_is_complete() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    first = scheduler.admit(awaited(1, 13, 2, first=7), 0.0)
    begin_read(scheduler, first.id, first.params.attempt, 0, 4, 1)
    finish_read(scheduler, first.id, 4, 0.0)
    targets, _ = begin_read(scheduler, first.id, first.params.attempt, 4, 12, 2)
    second = scheduler.admit(awaited(2, 13, 2, first=7), 0.0)
    assert second.pages[:1] == first.pages[:1] and not {*second.pages} & {*targets}
    fail_read(scheduler, first.id)
    assert scheduler.admit(awaited(3, 13, 2, first=7), 0.0).num_cached == 4
    with pytest.raises(OfferRefusedError, match=r"offer of \[0, 12\) where \[4, 12\) is wanted"):
        begin_read(scheduler, second.id, second.params.attempt, 0, 12, 3)
    receive(scheduler, second)
    assert second.phase is Phase.ACTIVE


def test_a_prompt_whose_log_probabilities_are_told_is_computed_anew() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    for handle in (1, 2, 3):
        scored = scheduler.admit(answer(handle, 11, 1, first=7, num_prompt_logprobs=None if handle == 1 else 0), 0.0)
        assert (scored.num_cached, scored.num_to_score(99)) == (0, 0 if handle == 1 else 10)
        run(scheduler)
    assert (scheduler.kv.num_queried, scheduler.kv.num_hit) == (10, 0), "the others did no lookup"
    assert scheduler.admit(answer(4, 11, 1, first=7), 0.0).num_cached == 8


def test_the_newest_sequence_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler, _ = build_scheduler(num_pages=14, page_tokens=2)
    old = scheduler.admit(answer(1, 3, 20), 0.0)
    new = scheduler.admit(answer(2, 9, 16), 0.0)
    while new.phase is Phase.ACTIVE:
        step(scheduler)
    assert (new.phase, new.pages, new.computed) == (Phase.PREEMPTED, [], 0)
    assert scheduler.kv.cache.num_spare > 3
    with pytest.raises(NoRoomError):  # newcomers do not overtake it
        scheduler.admit(answer(3, 1, 1), 0.0)
    tokens = list(new.tokens)
    while old in list(scheduler):
        step(scheduler)
    planned = plan(scheduler, 99)
    assert [(one.sequence, one.begin + one.count, one.wants_token) for one in planned] == [(new, len(tokens), True)]
    assert list(new.tokens) == tokens
    assert scheduler.num_preemptions == new.num_preemptions == 1


def test_pages_without_the_draft_models_kv_are_marked_when_it_is_filled_in() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    first = scheduler.admit(answer(1, 14, 2, first=7), 0.0)
    assert first.draft_computed == 0
    step(scheduler)
    scheduler.kv.advance_draft(first, 6)  # a page and a half
    assert [scheduler.kv.cache.has_draft(page) for page in first.pages] == [True, False, False, False]
    second = scheduler.admit(answer(2, 14, 2, first=7), 0.0)
    assert (second.computed, second.draft_computed) == (12, 4)
    scheduler.kv.advance_draft(second, 9)
    third = scheduler.admit(answer(3, 14, 2, first=7), 0.0)
    assert third.draft_computed == 8
    scheduler.kv.advance_draft(third, 14)
    assert [scheduler.kv.cache.has_draft(page) for page in third.pages] == [True, True, True, False]
    scheduler.kv.advance_draft(third, 13)
    assert third.draft_computed == 13


def test_pages_that_are_read_behind_a_gap_do_not_count() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    scheduler.admit(answer(1, 9, 1, first=7), 0.0)  # computed here, without the draft model
    run(scheduler)
    sequence = scheduler.admit(awaited(2, 17, 2, first=7), 0.0)
    receive(scheduler, sequence)
    assert (sequence.computed, sequence.draft_computed) == (16, 0)
    scheduler.kv.advance_draft(sequence, 16)
    assert all(scheduler.kv.cache.has_draft(page) for page in sequence.pages[:4])


def test_the_next_step_is_planned_on_counts() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    sequence = scheduler.admit(answer(1, 6, 3), 0.0)
    flights = [plan(scheduler, 4), plan(scheduler, 4), plan(scheduler, 4)]
    assert [[(one.begin, one.count, one.wants_token) for one in planned] for planned in flights] == [
        [(0, 4, False)], [(4, 2, True)], [(6, 1, True)],
    ]  # fmt: skip
    assert (sequence.num_missing, sequence.num_coming, sequence.computed, sequence.launched) == (1, 2, 0, 7)
    flights.append(plan(scheduler, 4))
    assert sequence.num_missing == 0 and plan(scheduler, 4) == [], "no step past max_tokens"
    heard = [list(update.token_ids) for planned in flights for update in finish(scheduler, planned)]
    assert heard == [[token_at(6)], [token_at(7)], [token_at(8)]]
    assert len(scheduler) == 0


@pytest.mark.parametrize("is_aborted", [True, False])
def test_pages_stay_held_until_no_launched_step_can_touch_them(is_aborted: bool) -> None:
    scheduler, generations = build_scheduler(num_pages=3, page_tokens=4)
    stops = frozenset({token_at(5)})
    sequence = scheduler.admit(answer(1, 5, 6, stop_token_ids=stops), 0.0)
    first, second = plan(scheduler, 99), plan(scheduler, 99)
    before = list(generations)
    if is_aborted:
        assert scheduler.abort("g", [1]) == [sequence]
        assert finish(scheduler, first) == []
    else:
        assert [update.finish_reason for update in finish(scheduler, first)] == ["stop"]
    assert sequence.phase is Phase.ENDED and scheduler.kv.cache.num_held == 2 and sequence.row >= 0
    with pytest.raises(NoRoomError):
        scheduler.admit(answer(2, 9, 1), 0.0)
    assert generations == before
    assert finish(scheduler, second) == []
    assert (scheduler.kv.cache.num_held, len(scheduler), scheduler.num_launched) == (0, 0, 0)
    scheduler.admit(answer(3, 9, 1), 0.0)


def test_no_sequence_is_preempted_while_steps_are_launched() -> None:
    scheduler, _ = build_scheduler(num_pages=5, page_tokens=2)
    old, new = (scheduler.admit(answer(handle, 3, 6), 0.0) for handle in (1, 2))
    flights = [plan(scheduler, 99), plan(scheduler, 99)]
    assert not scheduler.is_short
    flights.append(plan(scheduler, 99))
    assert [one.sequence for one in flights[-1]] == [old] and scheduler.is_short
    assert new.phase is Phase.ACTIVE and scheduler.num_preemptions == 0
    for planned in flights:
        finish(scheduler, planned)
        scheduler.check()
    last = plan(scheduler, 99)
    assert [one.sequence for one in last] == [old] and not scheduler.is_short
    assert new.phase is Phase.PREEMPTED, "no further step is launched"
    finish(scheduler, last)
    run(scheduler)
    assert len(scheduler) == 0


def test_a_step_that_is_dropped_leaves_nothing_behind() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    sequence = scheduler.admit(answer(1, 11, 3, num_prompt_logprobs=0), 0.0)
    first = plan(scheduler, 8)
    before = (
        sequence.launched,
        sequence.scored,
        sequence.num_coming,
        sequence.num_steps_launched,
        scheduler.num_launched,
    )
    (dropped,) = plan(scheduler, 8)
    assert (dropped.begin, dropped.count, dropped.num_scored, dropped.wants_token) == (8, 3, 2, True)
    scheduler.drop_step(dropped)
    after = (
        sequence.launched,
        sequence.scored,
        sequence.num_coming,
        sequence.num_steps_launched,
        scheduler.num_launched,
    )
    assert after == before
    finish(scheduler, first)
    run(scheduler)


def test_rows_are_given_at_the_first_step_and_taken_back_at_the_end() -> None:
    scheduler, _ = build_scheduler(num_pages=40, page_tokens=4, max_running=2)
    sequences = [scheduler.admit(answer(handle, 3, 5), 0.0) for handle in (1, 2)]
    assert [one.row for one in sequences] == [-1, -1]
    launched = plan(scheduler, 99)
    rows = {one.row for one in sequences}
    assert len(rows) == 2 and rows <= set(range(num_rows_for(2)))
    scheduler.abort("g", [1, 2])
    others = [scheduler.admit(answer(handle, 3, 5), 0.0) for handle in (3, 4)]
    more = plan(scheduler, 99)
    assert {one.row for one in others} | rows == set(range(4)), "ended sequences keep theirs until collected"
    finish(scheduler, launched)
    finish(scheduler, more)
    scheduler._preempt(others[1])
    row = others[1].row
    step(scheduler)
    assert others[1].row == row, "a preempted sequence keeps its row"
    scheduler.check()


def test_a_call_that_takes_its_time_to_end_holds_no_row() -> None:
    scheduler, _ = build_scheduler(num_pages=40, page_tokens=4, max_running=1)
    calls = []
    for number in range(5):
        calls.append(scheduler.admit(prompt(number, 5, first=number), 0.0, is_kept=True))
        (planned,) = plan(scheduler, 99)
        scheduler.fail_step(planned, RuntimeError("no luck"), 0.0)
        scheduler.check()
    assert scheduler.kv.cache.num_held == 5, "pages that may be offered stay"
    for call in calls:
        scheduler.end(call)
    assert (len(scheduler), scheduler.kv.cache.num_held) == (0, 0)


def test_offers_are_of_so_many_pages_at_most() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4, max_running=1, max_offer_pages=2)
    sequence = scheduler.admit(prompt(1, 23), 0.0, is_kept=True)
    finish(scheduler, plan(scheduler, 11))
    assert [scheduler.kv.next_offer(sequence, begin) for begin in (0, 8)] == [range(8), None]
    finish(scheduler, plan(scheduler, 11))
    assert [scheduler.kv.next_offer(sequence, begin) for begin in (8, 16, 22)] == [range(8, 16), range(16, 22), None]


def test_an_accepted_offer_renews_the_lease_and_a_failed_one_does_not() -> None:
    scheduler, _ = build_scheduler(num_pages=9, page_tokens=2)
    sequence = scheduler.admit(awaited(1, 9, 1), now=0.0)
    begin_read(scheduler, sequence.id, sequence.params.attempt, 0, 4, 2)
    finish_read(scheduler, sequence.id, 4, now=7.0)
    assert next_deadline(scheduler) == 7.0 + LEASE_S
    begin_read(scheduler, sequence.id, sequence.params.attempt, 4, 8, 2)
    fail_read(scheduler, sequence.id)
    assert next_deadline(scheduler) == 7.0 + LEASE_S
    assert sequence.computed == 4
    (update,) = expire(scheduler, 17.0)
    assert (update.finish_reason, update.error) == ("expired", "no KV arrived within the lease of 10 s (--lease-s)")
    assert scheduler.kv.cache.num_held == 0


def test_a_lease_does_not_end_while_an_offer_is_read() -> None:
    scheduler, _ = build_scheduler(num_pages=9, page_tokens=2)
    sequence = scheduler.admit(awaited(1, 9, 1), now=0.0)
    begin_read(scheduler, sequence.id, sequence.params.attempt, 0, 4, 2)
    assert next_deadline(scheduler) is None and not expire(scheduler, LEASE_S + 5)
    finish_read(scheduler, sequence.id, 4, now=LEASE_S + 6)
    assert next_deadline(scheduler) == 2 * LEASE_S + 6
    begin_read(scheduler, sequence.id, sequence.params.attempt, 4, 8, 2)
    fail_read(scheduler, sequence.id)
    assert [update.finish_reason for update in expire(scheduler, 2 * LEASE_S + 6)] == ["expired"]


def test_refusals_name_numbers_and_settings() -> None:
    scheduler, _ = build_scheduler(num_pages=4, page_tokens=4, max_running=1)
    with pytest.raises(NeverFitsError, match="17 tokens need 5 pages; this worker has 4: raise --kv-memory-mib"):
        scheduler.admit(answer(1, 9, 8), 0.0)
    sequence = scheduler.admit(awaited(2, 9, 7), 0.0)
    with pytest.raises(NoRoomError, match="1 sequences are running, the most allowed by --max-running"):
        scheduler.admit(answer(3, 1, 1), 0.0)
    with pytest.raises(
        OfferRefusedError, match=rf"offer of attempt 9; session {sequence.id} is {sequence.params.attempt}"
    ):
        begin_read(scheduler, sequence.id, 9, 0, 8, 2)
    with pytest.raises(OfferRefusedError, match=r"offer of \[4, 8\) where \[0, 8\) is wanted"):
        begin_read(scheduler, sequence.id, sequence.params.attempt, 4, 8, 1)
    assert begin_read(scheduler, sequence.id, sequence.params.attempt, 0, 8, 2) == (sequence.pages[:2], [])
    with pytest.raises(OfferRefusedError, match="is reading another offer"):
        begin_read(scheduler, sequence.id, sequence.params.attempt, 0, 8, 2)


def test_the_last_to_go_is_noticed() -> None:
    scheduler, _ = build_scheduler(num_pages=9, page_tokens=2)
    empty: list[bool] = []
    scheduler.on_empty = lambda: empty.append(True)
    for handle in (1, 2):
        scheduler.admit(answer(handle, 2, 2), 0.0)
    scheduler.abort("g", [1])
    assert not empty
    scheduler.abort("g", [2])
    assert empty == [True]


@pytest.mark.parametrize(
    ("tokens", "kept", "reason", "computed"),
    [
        ([50], [50], "", 3),
        ([50, 51, 52], [50, 51, 52], "", 5),
        ([50, 7, 52], [50, 7], "stop", 4),
        ([50, 51, 52, 53, 54], [50, 51, 52, 53], "length", 6),
        ([50, 51, 52, 7, 54], [50, 51, 52, 7], "stop", 6),
    ],
)
def test_several_tokens_of_a_step(tokens: list[int], kept: list[int], reason: str, computed: int) -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    sequence = scheduler.admit(answer(1, 3, 4, stop_token_ids=frozenset({7}), num_logprobs=0), 0.0)
    (planned,) = plan(scheduler, 99)
    assert scheduler.make_room_for_drafts(sequence, 4) == 4
    logprobs = [TokenLogprobs(-float(token)) for token in tokens]
    update = scheduler.finish_step(planned, tokens, 1.0, logprobs)
    assert update is not None
    assert (list(update.token_ids), update.finish_reason, sequence.computed) == (kept, reason, computed)
    assert [one.logprob for one in update.logprobs] == [-token for token in kept]
    assert sequence.num_steps == 1 and sequence.launched == computed


def test_drafts_take_no_page_that_another_sequence_may_need() -> None:
    scheduler, _ = build_scheduler(num_pages=6, page_tokens=2)
    first, _second = (scheduler.admit(answer(handle, 1, 9), 0.0) for handle in (1, 2))
    plan(scheduler, 99)
    assert scheduler.make_room_for_drafts(first, 99) == 2 * 3 - 1, "of four pages two are left for two sequences"
    assert scheduler.kv.cache.num_spare == 2
    assert most_drafts(first) == 0 and replace(first.params, max_draft_tokens=99).max_draft_tokens == 99


def test_an_answer_that_is_whole_ends_with_the_step() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    sequence = scheduler.admit(answer(1, 3, 9), 0.0)
    (planned,) = plan(scheduler, 99)
    assert (planned.sequence, planned.count) == (sequence, 3)
    update = scheduler.finish_step(planned, [5], 0.0, is_whole=True)
    assert update is not None and (list(update.token_ids), update.finish_reason) == ([5], "stop")
    assert len(scheduler) == 0


def test_min_tokens_count_what_earlier_attempts_emitted() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    stops = frozenset({7, 8})
    params = answer(1, 6, 4, stop_token_ids=stops, num_emitted=2, min_tokens=4)
    sequence = scheduler.admit(params, 0.0)
    assert sequence.answer_begin == 4
    assert [sequence.forbidden_at(position) for position in range(6, 10)] == [stops, stops, frozenset(), frozenset()]
    with pytest.raises(ValueError, match="min_tokens is 7, but the answer has at most 6 tokens"):
        replace(params, min_tokens=7)
    with pytest.raises(ValueError, match="num_emitted is 6, expected less than 6 prompt tokens"):
        replace(params, num_emitted=6)


def test_timing_names_where_a_sequence_spent_its_time() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    sequence = scheduler.admit(awaited(1, 5, 3, first=7), 10.0)
    failed = scheduler.fail(scheduler.admit(awaited(2, 5, 3), 10.0), "no luck", 13.0).timing
    assert failed is not None
    assert (failed.prefill_s, failed.first_step_s, failed.decode_s, failed.steps) == (3.0, 0.0, 0.0, 0)
    assert sequence.is_waiting is False
    receive(scheduler, sequence, 12.0)
    *none, timing = [step(scheduler, now=now)[0].timing for now in (15.0, 16.0, 19.5)]
    assert none == [None, None] and timing is not None
    assert (timing.prefill_s, timing.first_step_s, timing.decode_s, timing.steps) == (2.0, 3.0, 4.5, 3)
    assert (timing.cached_tokens, timing.preemptions) == (0, 0)
    again = scheduler.admit(awaited(3, 5, 1, first=7), 20.0)
    (update,) = step(scheduler, now=21.0)
    assert update.sequence is again and update.timing is not None
    assert (update.timing.prefill_s, update.timing.first_step_s, update.timing.cached_tokens) == (0.0, 1.0, 4)


def test_an_answer_keeps_a_page_to_grow_into() -> None:
    scheduler, _ = build_scheduler(num_pages=3, page_tokens=4)
    scheduler.admit(answer(1, 3, 5), 0.0)
    with pytest.raises(NoRoomError, match="2 pages are needed, 1 are spare"):
        scheduler.admit(answer(2, 5, 1), 0.0)
    scheduler.admit(answer(3, 3, 1), 0.0)


def test_the_row_of_a_preempted_sequence_gets_its_new_pages() -> None:
    scheduler, _ = build_scheduler(num_pages=20, page_tokens=4)
    sequence = scheduler.admit(answer(1, 6, 9), 0.0)
    assert sequence.num_pages_in_row == -1, "to be opened"
    step(scheduler)
    sequence.num_pages_in_row = len(sequence.pages)  # as the loop does
    scheduler._preempt(sequence)
    assert sequence.num_pages_in_row == 0 and sequence.row >= 0
