"""Virtual time: runs actions in time order. Pure; actions at the same time keep their order of submission."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions at their times. Step ends come before everything else at the same time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, bool, int, Action]] = []  # a heap: (time, is not a step's end, number, action)
        self._num_asked = 0

    def at(self, moment: float, action: Action, is_step_end: bool = False) -> None:
        self._num_asked += 1
        heapq.heappush(self._coming, (moment, not is_step_end, self._num_asked, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run until done. RuntimeError if no action is left before that: a bug."""
        while not is_over():
            if not self._coming:
                raise RuntimeError("nothing happens any more, and it is not over")
            self.now, _, _, action = heapq.heappop(self._coming)
            action()
