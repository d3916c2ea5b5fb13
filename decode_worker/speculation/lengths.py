"""How far to draft: decided anew for every step from what drafts were worth and what a step costs. Pure.

With acceptance a, the i-th draft of a sequence gives a**i tokens on average: it counts only when all before it were
right. It costs a row of the step and, with a draft model, a share of one forward of that model. Drafts are added
while they raise the expected tokens per second of the whole step. So long drafts are made for sequences that are easy
to predict and in small batches; in large ones, whose rows are expensive, none.

A launched step's drafts need not be judged before the next step is launched, unless a grammar, penalties or a minimum
length are checked against them. For such sequences the step waits for the one before, which costs the device the time
that the host takes between two steps: they are drafted where that pays for the whole step.

Costs that were measured badly would stay so where nothing is drafted. A request that names its drafter therefore
probes: every PROBE_STEPS steps it drafts although that seems to be worth nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wire.sampling import MAX_DRAFT_TOKENS

PRIOR_ACCEPTANCE = 0.6  # of a sequence that nothing is known of
PRIOR_TRIALS = 2.0  # how many observed drafts that belief is worth
DECAY = 0.95  # of what was observed, a draft: the last 20 count
IDLE_DECAY = 0.98  # of what was observed, a step without a draft: after about 50 it is worth another try
SEARCH_S = 4e-5  # of the host, for the drafts of a sequence without the draft model: see drafters.NGRAM_WINDOW
PROBE_STEPS = 32
PROBE_LENGTHS = (1, 2, 4, 8)  # in turn: each measures another size of forwards; only from 2 on the draft model's


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the drafts for one sequence were right, the latest counting most."""

    right: float = 0.0
    tried: float = 0.0

    @property
    def rate(self) -> float:
        """Chance that the next draft is right, given that those before it were."""
        return (self.right + PRIOR_ACCEPTANCE * PRIOR_TRIALS) / (self.tried + PRIOR_TRIALS)

    def after(self, drafted: int, accepted: int) -> "Acceptance":
        """After a step with `drafted` drafts, of which the first `accepted` were right. The others were not tried."""
        if not drafted:
            return Acceptance(self.right * IDLE_DECAY, self.tried * IDLE_DECAY)
        tried = min(accepted + 1, drafted)
        kept = DECAY**tried
        return Acceptance(self.right * kept + accepted, self.tried * kept + tried)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of one forward by its rows: straight lines between points that were measured."""

    points: tuple[tuple[int, float], ...]  # (rows, seconds), rows ascending, at least one

    def seconds(self, rows: int) -> float:
        """Beyond the last point as steep as before it; below the first as at the first. 0 rows cost nothing."""
        if not rows:
            return 0.0
        left = self.points[0]
        if len(self.points) == 1 or rows <= left[0]:
            return left[1]
        for right in self.points[1:]:
            if rows <= right[0] or right is self.points[-1]:
                slope = (right[1] - left[1]) / (right[0] - left[0])
                return left[1] + max(slope, 0.0) * (rows - left[0])
            left = right
        raise AssertionError("the last point ends the loop")


@dataclass(frozen=True, slots=True)
class Costs:
    """What drafts cost."""

    step: CostCurve  # of the model
    draft: CostCurve | None  # of the draft model; None without one
    drain_s: float = 0.0  # what the step before costs that has to be collected first


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence of the step that may be drafted."""

    acceptance: float
    most: int  # drafts allowed: the request's limit, and one less than the tokens it may still get
    is_free: bool = False  # drafted without the draft model
    num_behind: int = 0  # positions that the draft model computes before its first draft; this step's share of them
    probe: int = 0  # drafts to make at least, whatever they cost
    drains: bool = False  # with drafts, the step before has to be collected first


def probe_length(num_steps: int) -> int:
    """How many tokens a sequence that probes drafts at least after so many steps; mostly 0."""
    num_probes, rest = divmod(num_steps + 1, PROBE_STEPS)
    return 0 if rest else PROBE_LENGTHS[(num_probes - 1) % len(PROBE_LENGTHS)]


def choose_lengths(candidates: Sequence[Candidate], other_rows: int, costs: Costs) -> list[int]:
    """How many tokens to draft for each candidate, when the step has `other_rows` besides one row for each of them.

    Sequences that may not be drafted are candidates too, with `most` 0: their tokens count.
    """
    if not candidates:
        return []
    running = [replace(one, most=0) if one.drains else one for one in candidates]
    lengths, best = _choose(running, other_rows, costs, 0.0)
    if any(one.drains and one.most for one in candidates):
        others, drained = _choose(candidates, other_rows, costs, costs.drain_s)
        if drained.tokens * best.seconds > best.tokens * drained.seconds:
            running, lengths = list(candidates), others
    return [max(length, min(one.probe, one.most)) for length, one in zip(lengths, running, strict=True)]


def _choose(candidates: Sequence[Candidate], other_rows: int, costs: Costs, more_s: float) -> tuple[list[int], "_Step"]:
    """The lengths and the step with them, which takes `more_s` more than its rows."""
    lengths = [0] * len(candidates)
    rows = other_rows + len(candidates)
    best = _Step(rows, float(len(candidates)), costs.step.seconds(rows) + more_s)
    for depth in range(1, MAX_DRAFT_TOKENS + 1):
        before = best
        for is_free in (True, False):
            group = [
                i
                for i, one in enumerate(candidates)
                if one.is_free is is_free and lengths[i] == depth - 1 and one.most >= depth
            ]
            num_rows = {i: 1 if depth > 1 or is_free else 1 + candidates[i].num_behind for i in group}
            group.sort(key=lambda i: -(candidates[i].acceptance ** depth) / num_rows[i])
            gains = [(candidates[i].acceptance ** depth, num_rows[i]) for i in group]
            search_s = SEARCH_S if is_free and depth == 1 else 0.0
            count, best = _extend(best, gains, costs.step, None if is_free else costs.draft, search_s)
            for i in group[:count]:
                lengths[i] = depth
        if best is before:
            break
    return lengths, best


@dataclass(frozen=True, slots=True)
class _Step:
    rows: int
    tokens: float  # expected
    seconds: float  # those of drafting included


def _extend(
    base: _Step, gains: Sequence[tuple[float, int]], step: CostCurve, draft: CostCurve | None, each_s: float
) -> tuple[int, _Step]:
    """How many of the drafts to add, first ones first, for the most tokens per second; and the step with them.

    `gains`: expected tokens of each draft, and rows of the draft model's forward for it. Each takes `each_s` besides.
    """
    num_best, best, tokens, draft_rows = 0, base, base.tokens, 0
    before = step.seconds(base.rows)
    for count, (gain, num_draft_rows) in enumerate(gains, start=1):
        rows, tokens, draft_rows = base.rows + count, tokens + gain, draft_rows + num_draft_rows
        seconds = base.seconds + step.seconds(rows) - before + (draft.seconds(draft_rows) if draft else count * each_s)
        if tokens * best.seconds > best.tokens * seconds:
            num_best, best = count, _Step(rows, tokens, seconds)
    return num_best, best
