"""Workers' counters against what happened: real services and loops in one process, a runner instead of a model."""

import asyncio
from collections.abc import Sequence

import pytest

from decode_worker.speculation.drafters import Draft, Drafter, Wanted
from tests.support.decoding import build_eager_speculator, decode
from tests.support.handover import PROMPT, used, workers
from tests.support.real_workers import (
    CHUNK_TOKENS,
    NUM_PAGES,
    PAGE_TOKENS,
    DecodeWorker,
    PrefillWorker,
    build_kv_engine,
    expected_answer,
    packed,
)
from worker.sequences import SequenceParams


def value(worker: PrefillWorker | DecodeWorker, name: str) -> float:
    found = worker.metrics.registry.get_sample_value(f"baton:{name}")
    assert found is not None, name
    return found


def gauges(worker: PrefillWorker | DecodeWorker) -> tuple[float, float]:
    return value(worker, "leases_open"), value(worker, "kv_cache_usage_perc")


async def test_a_hand_over_is_counted_on_both_sides() -> None:
    async with workers() as (opened, prefill, decode):
        assert gauges(prefill) == gauges(decode) == (0, 0)
        prefill.runner.may_run.clear()
        tickets = [await opened.reserve(handle, PROMPT) for handle in (1, 2)]
        held = -(-len(PROMPT) // PAGE_TOKENS)
        assert gauges(decode) == (2, 2 * held / NUM_PAGES)
        calls = [asyncio.ensure_future(prefill.run(ticket, PROMPT)) for ticket in tickets]
        while len(prefill.scheduler) < 2:  # noqa: ASYNC110, no event for it
            await asyncio.sleep(0.005)
        assert gauges(prefill) == (2, used(prefill) / NUM_PAGES) and used(prefill) > 0
        prefill.runner.may_run.set()
        told = [await call for call in calls]
        for handle in (1, 2):
            assert await opened.end_of(handle) == ("length", "")
        offers = value(decode, "offers_accepted_total")
        assert offers >= 2
        assert value(prefill, "offers_sent_total") == value(prefill, "offers_accepted_total") == offers
        assert value(decode, "kv_transfer_seconds_count") == offers
        assert value(decode, "kv_transfer_seconds_sum") == pytest.approx(sum(one.transfer_seconds for one in told))
        for name in ("queue", "prefill"):
            assert value(prefill, f"request_{name}_time_seconds_count") == 2
            seconds = sum(getattr(one, f"{name}_seconds") for one in told)
            assert value(prefill, f"request_{name}_time_seconds_sum") == pytest.approx(seconds) and seconds > 0
        assert value(decode, "leases_expired_total") == 0
        await opened.signal.until(lambda: used(prefill) == used(decode) == 0)
        assert gauges(prefill) == gauges(decode) == (0, 0)


class Liar(Drafter):
    """Drafts right, except for the last token of each draft."""

    def __init__(self, truth: Sequence[int]) -> None:
        self._truth = truth
        self.drafts: list[tuple[int, ...]] = []

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        (one,) = wanted
        begin = len(one.sequence.tokens) - one.sequence.params.num_prompt
        draft = list(self._truth[begin : begin + one.count])
        if draft:
            draft[-1] += 1
            self.drafts.append(tuple(draft))
        return [Draft(tuple(draft))]


def test_drafts_are_counted_and_those_that_were_right() -> None:
    prompt, num_tokens = PROMPT[:5], 30
    liar = Liar(expected_answer(prompt, num_tokens))
    engine, _runner = build_kv_engine(max_running=1)
    request = SequenceParams(
        "r", packed(prompt), len(prompt) - 1, num_tokens, handle=1, drafter="liar", max_draft_tokens=4
    )
    answers = decode(engine, [request], build_eager_speculator({"liar": liar}), chunk_tokens=CHUNK_TOKENS)
    assert answers.tokens[1] == expected_answer(prompt, num_tokens)
    registry = answers.metrics.registry
    drafted, right = sum(map(len, liar.drafts)), sum(len(draft) - 1 for draft in liar.drafts)
    assert drafted > right > 0
    assert registry.get_sample_value("baton:spec_draft_tokens_total") == drafted
    assert registry.get_sample_value("baton:spec_accepted_tokens_total") == right
    timing = answers.ends[1].timing
    assert timing is not None and (timing.draft_tokens, timing.accepted_tokens) == (drafted, right)
    assert registry.get_sample_value("baton:generation_tokens_total") == num_tokens
