"""How far to draft: decided anew for every step from what drafts were worth and what a step costs. Pure.

With acceptance a, the i-th draft of a sequence gives a**i tokens on average: it counts only when all before it were
right. It costs a row of the step and, with a draft model, a share of one forward of that model. Drafts are added
while they raise the expected tokens per second of the whole step. So long drafts are made for sequences that are easy
to predict and in small batches; in large ones, whose rows are expensive, none.

All answers of a step wait for all of its rows. So that none stutters as others are easy to predict, drafts at most
double the time of a step of several answers.

A step with drafts waits for the one before, which costs the device the time that the host takes between two steps: it
has drafts where they pay for that too.

Costs that were measured badly would stay so where nothing is drafted. A request that names its drafter therefore
probes: every PROBE_STEPS steps it drafts although that seems to be worth nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from wire.sampling import MAX_DRAFT_TOKENS

PRIOR_ACCEPTANCE = 0.6  # of a sequence that nothing is known of
PRIOR_TRIALS = 2.0  # how many observed drafts that belief is worth
DECAY = 0.95  # of what was observed, a draft: the last 20 count
IDLE_DECAY = 0.98  # of what was observed, a step without a draft: after about 50 it is worth another try
SEARCH_S = 4e-5  # of the host, for the drafts of a sequence, before that is measured: see repeats.WINDOW
PROBE_STEPS = 32
PROBE_LENGTHS = (1, 2, 4, 8)  # in turn: each measures another size of forwards; only from 2 on the draft model's
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # rows of a forward are counted as the next larger of these
NEWEST_SHARE = 0.1  # of the newest step in the average; the last 20 or so decide
MOST_SLOWER = 2.0  # times the seconds of a step of several answers without drafts
FORGOTTEN_STEPS = 1000  # steps after which a size that was not met again is forgotten


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
        return self.after_tree(min(accepted + 1, drafted), accepted)

    def after_tree(self, tried: int, right: int) -> "Acceptance":
        """After a step that tried the first choices of so many nodes."""
        if not tried:
            return Acceptance(self.right * IDLE_DECAY, self.tried * IDLE_DECAY)
        kept = DECAY**tried
        return Acceptance(self.right * kept + right, self.tried * kept + tried)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of one forward by its rows: straight lines between points that were measured."""

    points: tuple[tuple[int, float], ...]  # (rows, seconds), rows ascending, at least one

    def seconds(self, rows: int) -> float:
        """Beyond the last point as steep as before it; below the first as at the first. 0 rows cost nothing."""
        if not rows:
            return 0.0
        at = min(bisect_left(self.points, (rows,)), len(self.points) - 1)
        if not at:
            return self.points[0][1]
        (left, left_s), (right, right_s) = self.points[at - 1 : at + 1]
        return left_s + max((right_s - left_s) / (right - left), 0.0) * (rows - left)


@dataclass(slots=True)
class CostMeter:
    """Recent seconds of forwards, by their rows: measured at start, and by every step. The engine thread's.

    A measurement counts less with each step after it, and is forgotten in the end. Otherwise a bad one could make
    drafts look too expensive for ever: no step would draft, and so none would measure again.
    """

    _known: dict[int, tuple[float, int]] = field(default_factory=dict)  # size |-> average, step of the last measurement
    _steps: int = 0

    def note(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took `seconds`. Ones larger than any size are prompts, which do not count here."""
        size = next((size for size in SIZES if rows <= size), None)
        if size is not None:
            before, met = self._known.get(size, (seconds, 0))
            age = min(max(1, self._steps - met), FORGOTTEN_STEPS)
            self._known[size] = seconds + (1 - NEWEST_SHARE) ** age * (before - seconds), self._steps

    def end_step(self) -> None:
        """An engine step is over, whatever it measured."""
        self._steps += 1

    def curve(self) -> CostCurve | None:
        """The averages as a curve that never falls; None while nothing is known."""
        points, highest = [], 0.0
        for size, (seconds, met) in sorted(self._known.items()):
            if self._steps - met <= FORGOTTEN_STEPS:
                highest = max(highest, seconds)
                points.append((size, highest))
        return CostCurve(tuple(points)) if points else None


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of drafts."""

    step: CostCurve  # of the model
    draft: CostCurve | None  # of the draft model; None without one
    drain_s: float = 0.0  # for which the device has no work before a step with drafts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence of the step that may be drafted."""

    acceptance: float
    most: int  # drafts allowed: the request's limit, and one less than the tokens it may still get
    is_free: bool = False  # drafted without the draft model
    num_behind: int = 0  # positions that the draft model computes before its first draft; this step's share of them
    probe: int = 0  # drafts to make at least, whatever they cost
    nodes: Sequence[tuple[float, bool]] = ()  # of a tree, see `Branches.list_nodes`; none: drafts are a chain
    search_s: float = 0.0  # of the host, for its drafts

    def node(self, number: int) -> tuple[float, bool]:
        """The chance that the n-th draft is right, and whether it needs a forward of what drafts."""
        return self.nodes[number - 1] if self.nodes else (self.acceptance**number, True)


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
    lengths, tokens, seconds = _choose(candidates, other_rows, costs)
    if tokens * costs.step.seconds(other_rows + len(candidates)) <= len(candidates) * seconds:
        lengths = [0] * len(candidates)
    return [max(length, min(one.probe, one.most)) for length, one in zip(lengths, candidates, strict=True)]


def _choose(candidates: Sequence[Candidate], other_rows: int, costs: Costs) -> tuple[list[int], float, float]:
    """The lengths of a step that waits for the one before, the tokens expected of it, and its seconds."""
    lengths = [0] * len(candidates)
    rows, tokens = other_rows + len(candidates), float(len(candidates))
    seconds = costs.step.seconds(rows) + costs.drain_s
    most_s = MOST_SLOWER * seconds if rows > 1 else inf
    for depth in range(1, MAX_DRAFT_TOKENS + 1):
        before = rows
        for is_free in (True, False):
            draft, search_s = None if is_free else costs.draft, 0.0
            group = _rank(candidates, lengths, depth, is_free)
            # Add the first ones, as many as give the most tokens per second.
            all_tokens, base_s, draft_rows, num_best = tokens, seconds, 0, 0
            for count, (gain, num_rows, i) in enumerate(group, start=1):
                all_tokens, draft_rows = all_tokens + gain, draft_rows + num_rows
                search_s += candidates[i].search_s if depth == 1 else 0.0
                drafting_s = search_s + (draft.seconds(draft_rows) if draft else 0.0)
                all_s = base_s + costs.step.seconds(rows + count) - costs.step.seconds(rows) + drafting_s
                if all_s > most_s:
                    break
                if all_tokens * seconds > tokens * all_s:
                    num_best, tokens, seconds = count, all_tokens, all_s
            rows += num_best
            for _gain, _rows, i in group[:num_best]:
                lengths[i] = depth
        if rows == before:
            break
    return lengths, tokens, seconds


def _rank(
    candidates: Sequence[Candidate], lengths: Sequence[int], depth: int, is_free: bool
) -> list[tuple[float, int, int]]:
    """Drafts to add at this depth, the most promising first: tokens gained, rows of the draft model, the index."""
    group = []
    for i, one in enumerate(candidates):
        if one.is_free is is_free and lengths[i] == depth - 1 and one.most >= depth:
            gain, is_deeper = one.node(depth)
            group.append((gain, is_deeper if depth > 1 or is_free else 1 + one.num_behind, i))
    return sorted(group, key=lambda one: -one[0] / (one[1] or 1))
