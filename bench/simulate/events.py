"""Virtual time: what happens when. Pure; equal moments keep the order in which they were asked for."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions at their moments. Ends of steps come before all else at the same moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, bool, int, Action]] = []  # a heap: (moment, is no step's end, number, action)
        self._num_asked = 0

    def at(self, moment: float, action: Action, is_step_end: bool = False) -> None:
        self._num_asked += 1
        heapq.heappush(self._coming, (moment, not is_step_end, self._num_asked, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until it is over. RuntimeError when nothing is left that could end it: a bug."""
        while not is_over():
            if not self._coming:
                raise RuntimeError("nothing happens any more, and it is not over")
            self.now, _, _, action = heapq.heappop(self._coming)
            action()
