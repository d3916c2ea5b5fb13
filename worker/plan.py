"""Decides what the next engine step computes: one pure function for all roles. A role is a `TokenBudget`."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from wire.sampling import MAX_DRAFT_TOKENS
from worker.params import SequenceParams
from worker.scheduler import Scheduler
from worker.sequences import Phase, ScheduledSequence, Sequence

FEWEST = 16  # tokens of a chunk, whatever they take: about a page
MAX_SCORED = 128  # per step: a prompt token with log-probabilities costs as much as a sampled one


class ChunkSizes:
    """How many prompt tokens the next step computes: as many as allowed. chunks.py learns it from measured steps."""

    has_goal = False

    def __init__(self, most: int, fewest: int = FEWEST) -> None:
        """`fewest`: the smallest chunk that is worth a step."""
        self._most, self._fewest = most, fewest
        self.quiet_s = 0.0  # a step with answers alone takes, on average; 0: not known
        self.token_s = 0.0  # each prompt token adds to a step; 0: not known
        self.fixed_s = 0.0  # a chunk of any size adds to a step with answers, on average

    @property
    def alone(self) -> int:
        """Prompt tokens of the next step, without answers."""
        return self._most

    @property
    def beside(self) -> int:
        """Prompt tokens of the next step, beside answers."""
        return self._most

    def beside_by_goal(self, num_answers: int) -> int | None:
        """Prompt tokens of the next step beside so many answers, by the goal; None without one."""
        return None

    def most_answers(self, limit: int) -> int:
        """Answers whose steps keep the goal, also beside the smallest chunk: from 1 to `limit`."""
        return limit

    def predict(self, num_answers: int, num_prompt_tokens: int) -> float:
        """Seconds of a step with these numbers of answer and prompt tokens; 0: not known."""
        return 0.0

    def note_step(self, num_answers: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step with these numbers of answer and prompt tokens took `seconds`."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The limits of one step."""

    prompt_tokens: int
    setting: str  # the flag that sets it, for error messages
    fewest_prompt_tokens: int = FEWEST  # of a chunk, unless a prompt has fewer left
    beside_answers: int | None = None  # prompt tokens beside two answers per prompt; None: prompt_tokens
    build_sizer: Callable[[int, int], ChunkSizes] = ChunkSizes  # from prompt_tokens and fewest_prompt_tokens
    by_goal: Callable[[int], int | None] = lambda num_answers: None  # prompt tokens beside them; None: no goal
    num_stages: int = 1  # of the model: as many steps are in flight, none with a token that another is yet to choose
    fit: Callable[[SequenceParams, int, int], int] = lambda params, begin, count: count
    """(params, begin, count) |-> how many positions from `begin` on may be one step's, about `count`"""

    def beside(self, num_prompts: int, num_answers: int) -> int:
        """Prompt tokens of a step: proportionally more with more than two prompts, or more than one per two answers.

        Waiting prompts lose more time than the answers, and large chunks take less time per token. A goal comes first.
        """
        if self.beside_answers is None or not num_answers:
            return self.prompt_tokens
        if (fitting := self.by_goal(num_answers)) is not None:
            return fitting
        growth = max(1.0, 2 * num_prompts / num_answers, num_prompts / 2)
        return min(self.prompt_tokens, int(self.beside_answers * growth))


def schedule(scheduler: Scheduler, budget: TokenBudget) -> list[ScheduledSequence]:
    """The next token of every active answer, oldest first, then as many prompt positions as the budget allows.

    An answer may have to compute tokens of its last step again, after a wrong draft (states/): that is not a prompt.

    Makes room page by page: on the way, sequences may be preempted (newest first) or resumed. Calls `begin_step` for
    everything planned.
    """
    scheduler.is_short = False
    scheduler.resume_preempted()
    planned: list[ScheduledSequence] = []
    prompts: list[Sequence] = []
    active = scheduler if budget.num_stages == 1 else scheduler.in_phase(Phase.ACTIVE)
    most_answers = -(-len(active) // budget.num_stages)
    for sequence in scheduler:
        missing = sequence.num_missing if budget.num_stages == 1 or not sequence.num_coming else 0
        if sequence.phase is not Phase.ACTIVE or not missing:  # it may just have been preempted for an older one
            continue
        is_again = missing <= 1 + MAX_DRAFT_TOKENS and sequence.launched >= sequence.params.end
        if not sequence.params.max_tokens or (missing > 1 and not is_again):
            prompts.append(sequence)
        elif len(planned) < most_answers and scheduler.make_room(sequence, sequence.launched + missing):
            count = missing if missing == 1 else _cut(scheduler, sequence, missing)
            planned.append(_take(sequence, count, missing, is_answer=True))
    if prompts:
        planned += _plan_prompts(scheduler, prompts, budget, len(planned))
    for step in planned:
        scheduler.begin_step(step)
    return planned


def _plan_prompts(
    scheduler: Scheduler, prompts: Seq[Sequence], budget: TokenBudget, num_answers: int
) -> list[ScheduledSequence]:
    num_tokens = budget.beside(len(prompts), num_answers)
    active = [sequence for sequence in prompts if sequence.phase is Phase.ACTIVE]
    missing, counts, score_budget = [sequence.num_missing for sequence in active], list[int](), MAX_SCORED
    for sequence, most in zip(active, missing, strict=True):  # upper limit of each; scores go to the oldest first
        count = min(most, sequence.num_until_scored(score_budget))
        score_budget -= sequence.num_to_score(count)
        counts.append(count)
    planned = []
    for sequence, most, count in zip(active, missing, share_prompt_tokens(counts, num_tokens), strict=True):
        if count > 0:
            count = budget.fit(sequence.params, sequence.launched, _cut(scheduler, sequence, count))
            planned.append(_take(sequence, count, most))
    return planned


def _cut(scheduler: Scheduler, sequence: Sequence, count: int) -> int:
    """The next `count` positions, or fewer, up to where the state is to be kept."""
    return min(count, scheduler.kv.states.find_stop(sequence, sequence.launched) - sequence.launched)


def _take(sequence: Sequence, count: int, missing: int, *, is_answer: bool = False) -> ScheduledSequence:
    wants_token = bool(sequence.params.max_tokens) and count == missing
    num_scored = sequence.num_to_score(count)
    return ScheduledSequence(sequence, sequence.launched, count, num_scored, wants_token, is_answer)


def share_prompt_tokens(missing: Seq[int], budget: int) -> list[int]:
    """How many positions each prompt gets. `missing`: how many each lacks, oldest first.

    Half of the budget goes to the oldest, so that none starves. The rest goes to the prompts that lack least, so that a
    short prompt does not wait for a long one. Equal prompts run one after the other, which finishes each soonest.
    """
    shares = [0] * len(missing)
    left = budget
    if missing:
        shares[0] = min(missing[0], -(-budget // 2))
        left -= shares[0]
    for index in sorted(range(len(missing)), key=lambda index: (missing[index], index)):
        more = min(missing[index] - shares[index], left)
        shares[index] += more
        left -= more
    return shares
