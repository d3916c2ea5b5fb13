"""The scheduler by example: admission, preemption, offers, refusals, timing; and what it puts into a step."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
)
from wire.images import ImageSpan
from wire.logprobs import TokenLogprobs
from worker.admission import OverGoalError
from worker.images.spans import fit_chunk, fit_images
from worker.plan import MAX_SCORED, TokenBudget, schedule, share_prompt_tokens
from worker.prefix_cache import NeverFitsError, NoRoomError, PrefixCache
from worker.receiving import OfferRefusedError, begin_read, fail_read, finish_read, next_offer
from worker.sequences import Phase, ScheduledSequence
from worker.states.slots import StateSlots


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
    scheduler = build_scheduler(num_pages=40, page_tokens=4)
    scheduler.admit(answer(1, 9, 1, first=7), 0.0)
    run(scheduler)
    sequence = scheduler.admit(awaited(2, length, 1, first=7, local_prefill_max_tokens=local), 0.0)
    assert (sequence.num_cached, sequence.phase) == (cached, phase)


def test_the_newest_sequence_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler = build_scheduler(num_pages=14, page_tokens=2)
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


def test_a_prompt_that_is_handed_over_keeps_its_pages() -> None:
    scheduler = build_scheduler(num_pages=14, page_tokens=2)
    old = scheduler.admit(answer(1, 3, 20), 0.0)
    handed = scheduler.admit(prompt(2, 9), 0.0, is_kept=True)
    while old.phase is Phase.ACTIVE and len(old.tokens) < 20:
        before = len(old.tokens)
        step(scheduler)
        if len(old.tokens) == before:
            break
    assert handed.phase is Phase.ACTIVE and handed.computed == handed.params.end
    assert old.phase is Phase.ACTIVE, "it waits for room"
    scheduler.end(handed)
    while old in list(scheduler):
        step(scheduler)


def test_new_answers_that_would_break_the_goal_are_refused_and_started_ones_are_not() -> None:
    scheduler = build_scheduler(num_pages=40, page_tokens=4, max_running=8)
    asked = []
    scheduler.most_answers = lambda limit: asked.append(limit) or min(2, limit)  # type: ignore[func-returns-value]
    for number in (1, 2):
        scheduler.admit(answer(number, 3, 9), 0.0)
    with pytest.raises(OverGoalError, match="2 answers run, and more than 2 would break --itl-goal-ms"):
        scheduler.admit(answer(3, 3, 9), 0.0)
    scheduler.admit(prompt(4, 3), 0.0)
    scheduler.admit(answer(5, 3, 9, num_emitted=1), 0.0)
    assert asked == [1, 2, 3], "prompts of other workers and answers that have begun do not ask"


def test_a_call_that_takes_its_time_to_end_holds_no_row() -> None:
    scheduler = build_scheduler(num_pages=40, page_tokens=4, max_running=1)
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
    scheduler = build_scheduler(num_pages=20, page_tokens=4, max_running=1, max_offer_pages=2)
    sequence = scheduler.admit(prompt(1, 23), 0.0, is_kept=True)
    finish(scheduler, plan(scheduler, 11))
    assert [next_offer(scheduler.kv, sequence, begin) for begin in (0, 8)] == [range(8), None]
    finish(scheduler, plan(scheduler, 11))
    assert next_offer(scheduler.kv, sequence, 8, factor=8) == range(8, 22), "over a fast transport all that is there"
    assert [next_offer(scheduler.kv, sequence, begin) for begin in (8, 16, 22)] == [range(8, 16), range(16, 22), None]


def test_an_accepted_offer_renews_the_lease_and_a_failed_one_does_not() -> None:
    scheduler = build_scheduler(num_pages=9, page_tokens=2)
    sequence = scheduler.admit(awaited(1, 9, 1), now=0.0)
    begin_read(scheduler, sequence.id, sequence.params.attempt, 0, 4, 2)
    assert scheduler.next_deadline() is None and not scheduler.expire(LEASE_S + 5), "it is being read"
    finish_read(scheduler, sequence.id, 4, now=7.0)
    assert scheduler.next_deadline() == 7.0 + LEASE_S
    begin_read(scheduler, sequence.id, sequence.params.attempt, 4, 8, 2)
    fail_read(scheduler, sequence.id)
    assert scheduler.next_deadline() == 7.0 + LEASE_S
    assert sequence.computed == 4
    (update,) = scheduler.expire(17.0)
    assert (update.finish_reason, update.error) == ("expired", "no KV arrived within the lease of 10 s (--lease-s)")
    assert scheduler.kv.cache.num_held == 0


def test_refusals_name_numbers_and_settings() -> None:
    scheduler = build_scheduler(num_pages=4, page_tokens=4, max_running=1)
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
    scheduler = build_scheduler(num_pages=9, page_tokens=2)
    empty: list[bool] = []
    scheduler.on_empty = lambda: empty.append(True)
    for handle in (1, 2):
        scheduler.admit(answer(handle, 2, 2), 0.0)
    scheduler.abort("g", [1])
    assert not empty
    scheduler.abort("g", [2])
    assert empty == [True]


def test_drafts_take_no_page_that_another_sequence_may_need() -> None:
    scheduler = build_scheduler(num_pages=6, page_tokens=2)
    first, _second = (scheduler.admit(answer(handle, 1, 9), 0.0) for handle in (1, 2))
    plan(scheduler, 99)
    assert scheduler.make_room_for_drafts(first, 99) == 2 * 3 - 1, "of four pages two are left for two sequences"
    assert scheduler.kv.cache.num_spare == 2
    assert most_drafts(first) == 0 and replace(first.params, max_draft_tokens=99).max_draft_tokens == 99


def test_min_tokens_count_what_earlier_attempts_emitted() -> None:
    scheduler = build_scheduler(num_pages=20, page_tokens=4)
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
    scheduler = build_scheduler(num_pages=20, page_tokens=4)
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
    scheduler = build_scheduler(num_pages=3, page_tokens=4)
    scheduler.admit(answer(1, 3, 5), 0.0)
    with pytest.raises(NoRoomError, match="2 pages are needed, 1 are spare"):
        scheduler.admit(answer(2, 5, 1), 0.0)
    scheduler.admit(answer(3, 3, 1), 0.0)


MISSING = st.lists(st.integers(1, 50), max_size=8)


def counts(step: list[ScheduledSequence]) -> list[tuple[str, int]]:
    return [(planned.sequence.params.request_id, planned.count) for planned in step]


@given(MISSING, st.integers(1, 100))
def test_shares_waste_nothing_and_behind_the_oldest_those_that_lack_least_go_first(
    missing: list[int], tokens: int
) -> None:
    shares = share_prompt_tokens(missing, tokens)
    assert all(0 <= share <= lacks for share, lacks in zip(shares, missing, strict=True))
    assert sum(shares) == min(tokens, sum(missing))
    if missing:
        assert 2 * shares[0] >= min(tokens, 2 * missing[0]), "the oldest gets half, or all it lacks"
    behind = sorted(range(1, len(missing)), key=lambda index: (missing[index], index))
    for one, next_one in pairwise(behind):
        assert shares[one] == missing[one] or not shares[next_one]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4), st.integers(1, 20), st.integers(0, 30))
def test_no_step_ends_inside_an_image_that_is_seen_as_a_whole(
    parts: list[tuple[int, int]], tokens: int, begin: int
) -> None:
    images, end = list[ImageSpan](), 0
    for text, length in parts:
        images.append(ImageSpan(end + text, end + text + length, bytes(32)))
        end = images[-1].end
    end += 1
    inside = {at for image in images for at in range(image.begin + 1, image.end)}
    while begin < end:
        limit = min(tokens, end - begin)
        count = fit_images(images, begin, limit)
        assert count > 0 and begin + count <= end and begin + count not in inside
        beyond = [image for image in images if image.begin <= begin < image.end]
        assert count <= limit or count == beyond[0].end - begin
        begin += count


@pytest.mark.parametrize("begin", [3, 8])
def test_no_step_ends_inside_such_an_image_where_a_state_is_to_be_kept(begin: int) -> None:
    scheduler = build_scheduler(40, 4)
    scheduler.kv.states = StateSlots(PrefixCache(12, [0] * 12), 4, 8)
    image = ImageSpan(begin, 21, bytes(32))
    params = replace(answer(1, 30, 3), images=(image,), encodings={image.digest: None})
    sequence, ends = scheduler.admit(params, 0.0), list[int]()
    while sequence.num_missing > 1:
        step = schedule(scheduler, TokenBudget(99, "--chunk", fit=fit_chunk))
        ends.append(step[0].begin + step[0].count)
        finish(scheduler, step)
        scheduler.check()
    assert ends == [begin, 21, 24, 28, 30]


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=8), st.integers(1, 20))
def test_answers_are_oldest_first_and_prompts_within_the_budget(lives: list[tuple[int, bool]], tokens: int) -> None:
    scheduler = build_scheduler(400, 4)
    for handle, (length, has_answer) in enumerate(lives, start=1):
        scheduler.admit(answer(handle, length, 3) if has_answer else prompt(handle, length + 1), 0.0)
    while any(sequence.num_missing for sequence in scheduler):
        answers = [one for one in scheduler if one.params.max_tokens and one.num_missing == 1]
        prompts = [one for one in scheduler if one.num_missing and one not in answers]
        missing = {one.id: one.num_missing for one in prompts}
        step = plan(scheduler, tokens)
        assert [planned.sequence for planned in step[: len(answers)]] == answers
        assert all(planned.count == 1 and planned.wants_token for planned in step[: len(answers)])
        behind = step[len(answers) :]
        assert sum(planned.count for planned in behind) == min(tokens, sum(missing.values()))
        for planned in behind:
            is_whole = planned.count == missing[planned.sequence.id]
            assert planned.wants_token == (is_whole and bool(planned.sequence.params.max_tokens))
        finish(scheduler, step)
        scheduler.check()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(2, 4))
def test_stages_have_a_group_of_answers_each_whose_last_tokens_are_known(ends: list[int], stages: int) -> None:
    scheduler, budget = build_scheduler(400, 4, max_running=9), TokenBudget(99, "--chunk", num_stages=stages)
    for handle, max_tokens in enumerate(ends):
        scheduler.admit(answer(handle, 2, max_tokens), 0.0)
    flights: list[list[ScheduledSequence]] = []
    sizes = []
    while list(scheduler):
        is_known = {sequence.id: not sequence.num_coming for sequence in scheduler}
        step = schedule(scheduler, budget)
        assert all(is_known[planned.sequence.id] for planned in step)
        flights += [step] if step else []
        while len(flights) > (stages - 1 if step else 0):
            sizes.append(len(flights[0]))
            finish(scheduler, flights.pop(0))
        scheduler.check()
    first = sizes[stages : 2 * stages] if min(ends) > 2 and len(ends) >= 2 * stages else []
    assert not first or max(first) <= -(-len(ends) // stages)


def test_an_answer_computes_right_tokens_again_without_waiting_for_a_prompts_turn() -> None:
    """Where a draft was wrong that its state has seen, or pages went and most came back. The goal leaves no chunk."""
    scheduler = build_scheduler(40, 4)
    scheduler.kv.states = StateSlots(PrefixCache(12, [0] * 12), 4, 8)
    budget = TokenBudget(99, "--chunk", beside_answers=99, by_goal=lambda num_answers: 0)
    first, second = (scheduler.admit(answer(handle, 9, 30), 0.0) for handle in (1, 2))
    while first.num_missing > 1 or second.num_missing > 1:
        finish(scheduler, plan(scheduler, 99))
    waiting = scheduler.admit(answer(3, 30, 3), 0.0)
    num_again = 0
    for _ in range(16):
        planned = schedule(scheduler, budget)
        assert {one.sequence for one in planned} == {first, second} and all(one.is_answer for one in planned)
        num_again += sum(one.count for one in planned) - 2
        for one in planned:
            if one.sequence is second and one.wants_token and one.count == 1:
                one.drafts = [8] * scheduler.make_room_for_drafts(second, 3)
        for one in planned:
            scheduler.finish_step(one, [7] * (min(len(one.drafts), 1) + one.wants_token), 0.0)
        scheduler.check()
    assert num_again and waiting.num_missing == 30


def test_a_prompt_that_is_being_handed_over_leaves_its_share_to_the_oldest_that_lacks_kv() -> None:
    scheduler = build_scheduler(400, 4)
    scheduler.admit(prompt(1, 5), 0.0, is_kept=True)
    finish(scheduler, plan(scheduler, 64))
    for handle, length in ((2, 201), (3, 41), (4, 41)):
        scheduler.admit(prompt(handle, length), 0.0, is_kept=True)
    assert counts(plan(scheduler, 64)) == [("r2", 32), ("r3", 32)]


def scores(planned: ScheduledSequence) -> list[TokenLogprobs]:
    """Each value identifies its token."""
    return [TokenLogprobs(float(planned.begin + 1 + at)) for at in range(planned.num_scored)]


@given(st.lists(st.integers(2, 400), min_size=1, max_size=4), st.integers(1, 300), st.integers(0, 1))
def test_scores_are_told_once_and_in_order_with_steps_ahead(lengths: list[int], tokens: int, ahead: int) -> None:
    scheduler = build_scheduler(1000, 4)
    told: dict[int, list[float]] = {}
    for handle, length in enumerate(lengths, start=1):
        scheduler.admit(answer(handle, length, 2, num_prompt_logprobs=0), 0.0)
        told[handle] = []
    flights: list[list[ScheduledSequence]] = []
    while list(scheduler):
        step = plan(scheduler, tokens)
        assert sum(planned.num_scored for planned in step) <= MAX_SCORED
        assert all(0 <= planned.num_scored <= planned.count for planned in step)
        if step:
            flights.append(step)
        while len(flights) > (ahead if step else 0):
            for update in finish(scheduler, flights.pop(0), scores=scores):
                told[update.sequence.params.handle] += [one.logprob for one in update.prompt_logprobs]
        scheduler.check()
    assert told == {handle: list(range(1, length)) for handle, length in enumerate(lengths, start=1)}
