"""Speculation: repeats as drafts, and how many drafts pay off."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.service import build_params
from decode_worker.speculation import speculator
from decode_worker.speculation.drafters import ModelDrafter, Wanted
from decode_worker.speculation.lengths import (
    FORGOTTEN_STEPS,
    PROBE_LENGTHS,
    PROBE_STEPS,
    SIZES,
    Acceptance,
    Candidate,
    CostCurve,
    CostMeter,
    Costs,
    choose_lengths,
    probe_length,
)
from decode_worker.speculation.repeats import LONGEST_MATCH, SHORTEST_MATCH, propose_repeat
from engine.batch import ForwardRow
from engine.cuda.graph_shapes import choose_shapes
from engine.layer_config import MAX_LOGITS_AT_ONCE
from engine.runner import ModelOutput
from protos import decode_pb2
from tests.support.real_workers import PLAIN
from tests.support.sequence_params import answer, build_scheduler
from wire.sampling import MAX_DRAFT_TOKENS
from worker.sequences import Sequence

FLAT = CostCurve(((1, 1.0), (16, 1.0), (64, 4.0)))  # 16 rows cost as much as one
STEEP = CostCurve(((1, 1.0), (64, 64.0)))  # equal cost per row: drafting never pays off
CHEAP_DRAFT = CostCurve(((1, 0.05), (64, 0.1)))
ROWS = CostCurve(((1, 0.05), (64, 3.2)))  # a draft model with equal cost per row


def propose_slowly(tokens: list[int], count: int) -> list[int]:
    """The specification of `propose_repeat`, trying every place."""
    for size in range(min(LONGEST_MATCH, len(tokens) - 1), SHORTEST_MATCH - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                read = list(tokens)
                for i in range(count):
                    read.append(read[begin + size + i])
                return read[len(tokens) :]
    return []


@given(st.lists(st.sampled_from([0, 1, 2, 256, 65536, 1 << 24]), max_size=40), st.integers(1, 9))
def test_a_repeat_is_found_where_a_search_of_all_places_finds_it(tokens: list[int], count: int) -> None:
    assert propose_repeat(array("i", tokens), count) == propose_slowly(tokens, count)


def test_drafts_fade_as_the_batch_grows() -> None:
    counts = (1, 4, 8, 16, 64)
    totals = [choose_lengths([Candidate(0.7, 16)] * count, 0, Costs(FLAT, CHEAP_DRAFT)) for count in counts]
    means = [sum(lengths) / len(lengths) for lengths in totals]
    assert means == sorted(means, reverse=True) and means[0] >= 3 and means[-1] < 0.5
    for count in counts:  # where rows cost what tokens bring
        assert choose_lengths([Candidate(0.9, 16)] * count, 0, Costs(STEEP, CHEAP_DRAFT)) == [0] * count


def test_catching_up_is_paid_for() -> None:
    """The draft model's first forward for a sequence also computes the KV that it lacks."""
    near, far = (choose_lengths([Candidate(0.9, 16, num_behind=behind)], 0, Costs(FLAT, ROWS)) for behind in (0, 200))
    assert near[0] > 2 and far == [0]
    free = choose_lengths([Candidate(0.9, 16, is_free=True, num_behind=200)], 0, Costs(FLAT, ROWS))
    assert free[0] > 2, "drafts that need no draft model do not wait for it"


@given(st.floats(0.5, 1), st.lists(st.floats(0.3, 1), min_size=1, max_size=4))
def test_a_sequence_that_is_far_behind_keeps_no_other_back(rate: float, others: list[float]) -> None:
    candidates = [Candidate(other, 16) for other in others]
    expected = choose_lengths([Candidate(rate, 0), *candidates], 0, Costs(FLAT, ROWS))
    assert choose_lengths([Candidate(rate, 16, num_behind=5000), *candidates], 0, Costs(FLAT, ROWS)) == expected


def test_a_step_waits_for_the_one_before_only_where_that_pays() -> None:
    def lengths(drain_s: float, num_others: int) -> list[int]:
        candidates = [Candidate(0.9, 8), *[Candidate(0.9, 0)] * num_others]
        return choose_lengths(candidates, 0, Costs(FLAT, None, drain_s))

    assert lengths(0.0, 0)[0] > 4
    assert lengths(0.01, 0) == lengths(0.0, 0)
    assert lengths(9.0, 0) == [0]
    assert lengths(1.0, 14) == [0] * 15, "it would cost the others more than it gains"


def test_drafts_at_most_double_a_step_of_several_answers() -> None:
    """An answer that nothing is drafted for waits no longer, however easy the others are."""
    curve = CostCurve(((1, 1.0), (8, 1.0), (128, 6.0)))
    assert choose_lengths([Candidate(1.0, 16)], 0, Costs(CostCurve(((1, 1.0), (17, 6.0))), None)) == [16]
    lengths = choose_lengths([Candidate(1.0, 0), *[Candidate(1.0, 16)] * 7], 0, Costs(curve, None))
    assert lengths[0] == 0 and sum(lengths) >= 14 and curve.seconds(8 + sum(lengths)) <= 2.0


def test_what_the_host_takes_for_drafts_counts() -> None:
    def lengths(search_s: float) -> list[int]:
        return choose_lengths([Candidate(0.8, 8, search_s=search_s)] * 2, 0, Costs(FLAT, CHEAP_DRAFT))

    assert lengths(0.0) == lengths(1e-3) != [0, 0]
    assert lengths(9.0) == [0, 0]


CANDIDATES = st.builds(
    Candidate, st.floats(0, 1), st.integers(0, 20), st.booleans(), st.integers(0, 300), st.integers(0, 8)
)


@given(st.lists(CANDIDATES, max_size=20), st.integers(0, 100), st.booleans())
def test_limits_hold(candidates: list[Candidate], other_rows: int, has_draft: bool) -> None:
    lengths = choose_lengths(candidates, other_rows, Costs(FLAT, CHEAP_DRAFT if has_draft else None, 0.1))
    assert all(0 <= length <= min(one.most, MAX_DRAFT_TOKENS) for length, one in zip(lengths, candidates, strict=True))


def test_acceptance_follows_what_happens() -> None:
    good = bad = mixed = Acceptance()
    for _ in range(20):
        good, bad = good.after(4, 4), bad.after(4, 0)
    assert good.rate > 0.9 and bad.rate < 0.15
    for _ in range(200):
        bad = bad.after(0, 0)  # forgiven
    assert bad.rate > 0.5
    for _ in range(100):
        mixed = mixed.after(3, 1)  # one right, one wrong, the third not tried
    assert abs(mixed.rate - 0.5) < 0.06


def true_seconds(rows: int) -> float:
    return 1.0 + 0.02 * rows


def planned_lengths(num_steps: int, *, probes: bool, noise: float = 1.0, has_draft: bool = False) -> list[int]:
    """Lengths planned for a sequence, per step. At first all but the smallest forwards look `noise` times slower."""
    meter, draft_meter = CostMeter(), CostMeter()
    for size in SIZES[:7]:
        meter.note(size, true_seconds(size) * (noise if size > 1 else 1.0))
        draft_meter.note(size, 0.05 * noise)
    planned = []
    for step in range(num_steps):
        curve, draft = meter.curve(), draft_meter.curve() if has_draft else None
        assert curve is not None
        (best,) = choose_lengths([Candidate(0.8, 8)], 0, Costs(curve, draft))
        probe = probe_length(step) if probes else 0
        (length,) = choose_lengths([Candidate(0.8, 8, probe=probe)], 0, Costs(curve, draft))
        assert length == max(best, probe)
        planned.append(best)
        for _depth in range(1, length):
            draft_meter.note(1, 0.05)
        meter.note(1 + length, true_seconds(1 + length))
        meter.end_step()
        draft_meter.end_step()
    return planned


@pytest.mark.parametrize("has_draft", [False, True])
def test_a_request_that_probes_drafts_again_soon_after_a_noisy_start(has_draft: bool) -> None:
    rounds = PROBE_STEPS * len(PROBE_LENGTHS)
    assert rounds < FORGOTTEN_STEPS / 2
    (quiet,) = set(planned_lengths(rounds, probes=False, has_draft=has_draft))
    assert quiet > 4
    assert planned_lengths(2 * rounds, probes=False, noise=50.0, has_draft=has_draft)[-1] == 0
    probing = planned_lengths(2 * rounds, probes=True, noise=50.0, has_draft=has_draft)[-1]
    assert abs(probing - quiet) <= 1  # a forward counts as one of the next larger size


@pytest.mark.parametrize(("name", "probes"), [("", False), ("auto", False), ("ngram", True), ("off", True)])
def test_who_names_a_drafter_probes(name: str, probes: bool) -> None:
    request = decode_pb2.ReserveRequest(prompt=bytes(8), max_tokens=1, sampling=PLAIN)
    request.speculation.drafter = name
    assert build_params(request, "ngram", 4).probes == probes


@dataclass
class CountingRunner:
    """Returns a token per row of logits, and records the number of positions of each forward."""

    vocab_size: int = 100
    num_positions: list[int] = field(default_factory=list)

    def launch(self, requests: Seq[ForwardRow]) -> "CountingRunner":
        self.num_positions.append(sum(part.count for part in requests))
        self._num_tokens = sum(part.num_logits for part in requests)
        return self

    def collect(self) -> ModelOutput:
        return ModelOutput([7] * self._num_tokens, [])


def test_a_draft_model_catches_up_within_one_budget_for_all_sequences() -> None:
    """32 sequences without draft KV once made one forward of 8,192 rows."""
    scheduler = build_scheduler(1000, 16, max_running=32)
    lagging = [scheduler.admit(answer(handle, 257, 50, max_draft_tokens=4), 0.0) for handle in range(1, 33)]
    runner = CountingRunner()
    drafter = ModelDrafter(runner, CostMeter(), 256)  # type: ignore[arg-type]
    drafted = list[Sequence]()
    for _ in range(4 + len(lagging)):  # one budget each time, after smaller ones
        runner.num_positions.clear()
        waiting = [sequence for sequence in lagging if sequence not in drafted]
        drafts = drafter.propose([Wanted(sequence, len(sequence.tokens), 4) for sequence in waiting])
        assert max(runner.num_positions) <= 256 + len(lagging)  # and the token that each drafts from
        for sequence, draft in zip(waiting, drafts, strict=True):
            if draft.lead is not None:
                sequence.draft_launched = len(sequence.tokens) + draft.lead
            if draft.token_ids:
                drafted.append(sequence)
    assert drafted == lagging, "the oldest first, and all in the end"


@given(
    st.sampled_from((32_000, 128_256, 151_936, 262_144)), st.integers(1, 512), st.integers(0, MAX_DRAFT_TOKENS),
    st.integers(1, 600),
)  # fmt: skip
def test_no_step_is_planned_with_drafts_for_which_no_graph_fits(
    vocab: int, max_sequences: int, max_drafts: int, num_sequences: int
) -> None:
    max_rows = MAX_LOGITS_AT_ONCE // vocab
    shapes = choose_shapes(max_sequences, max_drafts, max_rows)
    assert all(1 <= shape.num_rows <= max_rows for shape in shapes)
    here = speculator.Speculator({}, CostMeter(), "auto", MAX_DRAFT_TOKENS, graphs=shapes)
    assert here.most_drafts(num_sequences, has_prompts=True) == 0
    if most := here.most_drafts(num_sequences, has_prompts=False):
        assert num_sequences * (1 + most) <= max_rows, "logits are computed in one part"
        assert any(shape.num_sequences >= num_sequences and shape.num_tokens > most for shape in shapes)
