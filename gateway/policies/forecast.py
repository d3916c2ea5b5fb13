"""When a request that comes now would get its first token, from what is known of the fleet. Pure.

    places free                      0
    else                             (requests before it + 1) / places given a second while requests waited
    then, its prompt                 tokens before and of it / tokens a second, on the fastest worker

Before places were given, answers are taken to end at the speed of the last steps, after as many tokens as others had.
"""

from collections.abc import Iterable, Sequence
from math import exp, inf

from gateway.router.policies import Expectations
from gateway.router.request import Request
from gateway.router.worker_view import WorkerView

MEMORY_S = 30.0  # after which a place given counts 1 / e
SUPPOSED = 2.0  # places: how much the supposed ends weigh beside those seen
KEPT = 0.9  # weight of earlier answers' lengths when one is added


class Forecast(Expectations):
    """Learns how fast places get free and how long answers are."""

    def __init__(self) -> None:
        self._num_places = self._seconds = 0.0  # given, and in how long, while requests waited
        self._noted = 0.0
        self._is_waited_for = False  # then
        self._answer_tokens = 0.0

    def note_places(self, now: float, num_places: int, is_waited_for: bool) -> None:
        passed_s = max(now - self._noted, 0.0)
        kept = exp(-passed_s / MEMORY_S)
        self._num_places, self._seconds = kept * self._num_places, kept * self._seconds
        if self._is_waited_for:
            self._num_places, self._seconds = self._num_places + num_places, self._seconds + passed_s
        self._noted, self._is_waited_for = now, is_waited_for

    def note_answer(self, num_tokens: int) -> None:
        self._answer_tokens = KEPT * (self._answer_tokens or num_tokens) + (1 - KEPT) * num_tokens

    def expect_tokens(self, request: Request) -> float:
        return request.num_missing + self._expect_answer(request)

    def _expect_answer(self, request: Request) -> float:
        return min(request.num_left, self._answer_tokens or inf)

    def predict_wait_s(self, num_before: int, running: Iterable[Request], views: Sequence[WorkerView]) -> float:
        decodes = [view for view in views if view.answers and view.is_alive]
        num_free = sum(max(view.max_running - view.num_running, 0) for view in decodes if not view.is_full)
        if num_before < num_free:
            return 0.0
        step_s = max((view.costs.quiet_s for view in decodes), default=0.0)
        ends = sum(1 / (self._expect_answer(one) * step_s) for one in running) if step_s else 0.0  # a second
        places = self._num_places + (SUPPOSED if ends else 0.0)
        seconds = self._seconds + (SUPPOSED / ends if ends else 0.0)
        return (num_before - num_free + 1) * seconds / places if places else 0.0

    def predict_prompt_s(self, num_tokens: int, views: Sequence[WorkerView]) -> float:
        known = [view for view in views if view.is_alive and view.tokens_per_s]
        return min([(view.tokens_waiting + num_tokens) / view.tokens_per_s for view in known], default=0.0)
