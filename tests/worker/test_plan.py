"""The next step's contents: prompts share a budget, and answers come before prompts."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.support.sequence_params import answer, finish, prompt
from wire.logprobs import TokenLogprobs
from worker.kv_cache import KVCacheManager
from worker.plan import MAX_SCORED, TokenBudget, schedule, share_prompt_tokens
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence

MISSING = st.lists(st.integers(1, 50), max_size=8)


def build_scheduler(num_pages: int = 400, max_running: int = 8) -> Scheduler:
    return Scheduler(KVCacheManager(PrefixCache(num_pages, [0] * num_pages), 4), max_running, lease_s=10.0)


def budget(prompt_tokens: int) -> TokenBudget:
    return TokenBudget(prompt_tokens, "--chunk")


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


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=8), st.integers(1, 20))
def test_answers_are_oldest_first_and_prompts_within_the_budget(lives: list[tuple[int, bool]], tokens: int) -> None:
    scheduler = build_scheduler()
    for handle, (length, has_answer) in enumerate(lives, start=1):
        scheduler.admit(answer(handle, length, 3) if has_answer else prompt(handle, length + 1), 0.0)
    while any(sequence.num_missing for sequence in scheduler):
        answers = [one for one in scheduler if one.params.max_tokens and one.num_missing == 1]
        prompts = [one for one in scheduler if one.num_missing and one not in answers]
        missing = {one.id: one.num_missing for one in prompts}
        step = schedule(scheduler, budget(tokens))
        assert [planned.sequence for planned in step[: len(answers)]] == answers
        assert all(planned.count == 1 and planned.wants_token for planned in step[: len(answers)])
        behind = step[len(answers) :]
        assert sum(planned.count for planned in behind) == min(tokens, sum(missing.values()))
        for planned in behind:
            is_whole = planned.count == missing[planned.sequence.id]
            assert planned.wants_token == (is_whole and bool(planned.sequence.params.max_tokens))
        finish(scheduler, step)
        scheduler.check()


def test_a_prompt_that_is_being_handed_over_leaves_its_share_to_the_oldest_that_lacks_kv() -> None:
    scheduler = build_scheduler()
    scheduler.admit(prompt(1, 5), 0.0, is_kept=True)
    finish(scheduler, schedule(scheduler, budget(64)))
    for handle, length in ((2, 201), (3, 41), (4, 41)):
        scheduler.admit(prompt(handle, length), 0.0, is_kept=True)
    assert counts(schedule(scheduler, budget(64))) == [("r2", 32), ("r3", 32)]


def scores(planned: ScheduledSequence) -> list[TokenLogprobs]:
    """Each value identifies its token."""
    return [TokenLogprobs(float(planned.begin + 1 + at)) for at in range(planned.num_scored)]


@given(st.lists(st.integers(2, 400), min_size=1, max_size=4), st.integers(1, 300), st.integers(0, 1))
def test_scores_are_told_once_and_in_order_with_steps_ahead(lengths: list[int], tokens: int, ahead: int) -> None:
    scheduler = build_scheduler(num_pages=1000)
    told: dict[int, list[float]] = {}
    for handle, length in enumerate(lengths, start=1):
        scheduler.admit(answer(handle, length, 2, num_prompt_logprobs=0), 0.0)
        told[handle] = []
    flights: list[list[ScheduledSequence]] = []
    while list(scheduler):
        step = schedule(scheduler, budget(tokens))
        assert sum(planned.num_scored for planned in step) <= MAX_SCORED
        assert all(0 <= planned.num_scored <= planned.count for planned in step)
        if step:
            flights.append(step)
        while len(flights) > (ahead if step else 0):
            for update in finish(scheduler, flights.pop(0), scores=scores):
                told[update.sequence.params.handle] += [one.logprob for one in update.prompt_logprobs]
        scheduler.check()
    assert told == {handle: list(range(1, length)) for handle, length in enumerate(lengths, start=1)}
