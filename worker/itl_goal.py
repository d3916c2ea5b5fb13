"""Prompt tokens and answers for which a goal for the time between tokens (--itl-goal-ms) leaves room. Pure.

A step with n answers and p prompt tokens is predicted to take `base + answer * n` and what the chunk adds (chunks.py).
`margin` is the factor by which one step in 50 exceeds its prediction, and a step is meant to take `goal / margin`:

    prompt tokens beside n answers   what fits into the goal behind the answers; else FEWEST in one step of STARVED
    answers                          as many as leave room for the smallest chunk, so that prompts go on

One step in QUIET has no prompt, so that the cost of answers alone stays known while prompts never end.
"""

from collections.abc import Callable
from functools import partial
from math import inf

from worker.chunks import ChunkSizer

STARVED = 8  # steps with answers in which prompts wait for the smallest chunk, where it does not fit into the goal
QUIET = 16
KEPT = 0.95  # weight of earlier steps when one is added
RIDGE = 0.25  # variance of n below which the cost of an answer stays as it was found before
GROWTH = 2  # answers may be so many times those measured: nothing is known of more
FEW_STEPS = 8  # before the margin is learnt
SHARE_LATE, RATE = 0.02, 0.02  # of steps beyond the margin; how fast it is learnt
MOST_MARGIN = 1.5


class ItlGoal:
    """Learns from each step of a worker."""

    def __init__(self, goal_s: float) -> None:
        self._goal_s = goal_s
        self._margin = 1.0
        self._weight = self._sum_n = self._sum_nn = self._sum_s = self._sum_ns = 0.0  # of steps without prompts
        self._answer_s = 0.0
        self._num_steps = 0
        self._most_answers = 0  # in a step so far
        self._num_with = self._num_without = 0  # steps with answers in a row that had a prompt, or had none

    @property
    def meant_s(self) -> float:
        """Seconds that a step is meant to take."""
        return self._goal_s / self._margin

    def predict(self, num_answers: int) -> float:
        """Seconds of a step with answers alone; 0 before the first."""
        if not self._weight:
            return 0.0
        away = num_answers - self._sum_n / self._weight
        return max(self._sum_s / self._weight + self._answer_s * away, 0.0)

    def note_step(self, num_answers: int, num_prompt_tokens: int, seconds: float, predicted_s: float) -> None:
        """A step with answers took `seconds`."""
        self._most_answers = max(self._most_answers, num_answers)
        if predicted_s and self._num_steps >= FEW_STEPS:
            is_late = seconds > self._margin * predicted_s
            self._margin += RATE * ((1 - SHARE_LATE) if is_late else -SHARE_LATE)
            self._margin = min(max(self._margin, 1.0), MOST_MARGIN)
        if num_prompt_tokens:
            self._num_with, self._num_without = self._num_with + 1, 0
            return
        self._num_with, self._num_without = 0, self._num_without + 1
        self._num_steps += 1
        before = self.predict(num_answers)
        self._learn_line(num_answers, min(seconds, 2 * before) if before else seconds)  # more may be chance

    def _learn_line(self, n: int, s: float) -> None:
        """Least squares over recent steps; the slope changes only as far as `n` did."""
        self._weight = KEPT * self._weight + 1
        self._sum_n, self._sum_nn = KEPT * self._sum_n + n, KEPT * self._sum_nn + n * n
        self._sum_s, self._sum_ns = KEPT * self._sum_s + s, KEPT * self._sum_ns + n * s
        mean_n, mean_s = self._sum_n / self._weight, self._sum_s / self._weight
        variance = max(self._sum_nn / self._weight - mean_n**2, 0.0)
        found = self._sum_ns / self._weight - mean_n * mean_s + RIDGE * self._answer_s
        self._answer_s = min(max(found / (variance + RIDGE), 0.0), mean_s / mean_n)

    def fit_prompt(self, num_answers: int, fixed_s: float, token_s: float, fewest: int) -> int:
        """Prompt tokens of the next step beside so many answers. `fixed_s`, `token_s`: as in ChunkSizer."""
        if self._num_with >= QUIET:
            return 0
        room_s = self.meant_s - self.predict(num_answers) - fixed_s
        count = int(max(room_s, 0.0) / token_s) if token_s else fewest
        return count if count >= fewest else fewest if self._num_without + 1 >= STARVED else 0

    def most_answers(self, chunk_s: float, limit: int) -> int:
        """Answers whose steps keep the goal beside a chunk that adds `chunk_s`: from 1 to `limit`."""
        known = max(GROWTH * self._most_answers, GROWTH)
        room_s = self.meant_s - chunk_s - self.predict(0)
        fitting = room_s / self._answer_s if self._answer_s else inf if room_s > 0 else 1
        return int(max(min(fitting, known, limit), 1))


class GoalSizer(ChunkSizer):
    """Chunks beside answers that keep the goal, instead of STRETCH times the steps without prompts."""

    has_goal = True

    def __init__(self, most: int, fewest: int, *, goal_s: float) -> None:
        """`goal_s`: longest step with answers."""
        super().__init__(most, fewest)
        self._goal = ItlGoal(goal_s)

    def beside_by_goal(self, num_answers: int) -> int | None:
        fitting = self._goal.fit_prompt(num_answers, self.fixed_s, self.token_s, self._fewest)
        return min(fitting, self._ceiling, self._most)

    def most_answers(self, limit: int) -> int:
        return self._goal.most_answers(self.fixed_s + self.token_s * self._fewest, limit)

    @property
    def _full_beside(self) -> int:
        return self._fewest

    def _answers_s(self, num_answers: int) -> float:
        """By their number."""
        return self._goal.predict(num_answers)

    def note_step(self, num_answers: int, num_prompt_tokens: int, seconds: float) -> None:
        predicted_s = self.predict(num_answers, num_prompt_tokens)
        super().note_step(num_answers, num_prompt_tokens, seconds)
        if num_answers and seconds > 0:
            self._goal.note_step(num_answers, num_prompt_tokens, seconds, predicted_s)


def choose_sizer(goal_s: float) -> Callable[[int, int], ChunkSizer]:
    """`goal_s`: 0: there is no goal."""
    return partial(GoalSizer, goal_s=goal_s) if goal_s else ChunkSizer
