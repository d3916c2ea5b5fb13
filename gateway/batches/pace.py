"""How many answers of batches' lines run beside live ones. Pure.

They are to cost live answers little time between tokens, which depends on the machine: on a GPU a row more is nearly
free, on a CPU it is not. So the mean gap between their tokens is compared with that while no line ran.

    no live request for CALM_S ─► any number of answers
    beside live answers        ─► up to `limit`: one more while the gap is at most COST times the quiet one, else half;
                                  if even one line is too much, none for REST measurements: a batch goes on at any load
"""

from math import inf

CALM_S = 5.0
MEASURED_GAPS = 40  # least to compare
COST = 1.05  # the promise is 1.10 for the 99th percentile; rows cost the mean as much
REST = 20
RESERVE = 0.25  # of all places stays free for live requests


def count_room(num_places: int, num_free: int, num_waiting: int) -> int:
    """Answers of lines that may start now: places beyond the reserve, a part at once, none while requests wait."""
    room = num_free - max(int(RESERVE * num_places), 1)
    return 0 if num_waiting or room <= 0 else max(room // 4, 1)


class Pace:
    """Decides on the number of lines by what it sees at each `look`."""

    def __init__(self) -> None:
        self.num_answers = 0  # that run
        self.limit = 1  # beside live answers; below 1: none, and so many measurements until there is one
        self._quiet_s = 0.0  # mean gap while no line ran; 0: not measured
        self._peak = 0  # most of them at once since `_measured`
        self._measured = (0.0, 0)  # the gaps then
        self._live_at = -inf  # when a live request was last seen

    def begin(self) -> None:
        self.num_answers += 1
        self._peak = max(self._peak, self.num_answers)

    def end(self) -> None:
        self.num_answers -= 1

    def look(self, now: float, num_live: int, gaps_s: float, num_gaps: int) -> float:
        """The most of them that may run now. `gaps_s` and `num_gaps` between tokens of live answers since the start."""
        if num_live:
            self._live_at = now
        elif now - self._live_at > CALM_S:
            return inf
        before_s, num_before = self._measured
        if num_gaps - num_before >= MEASURED_GAPS:
            self._adapt((gaps_s - before_s) / (num_gaps - num_before))
            self._measured, self._peak = (gaps_s, num_gaps), self.num_answers
        return max(self.limit, 0)

    def _adapt(self, mean_s: float) -> None:
        if not self._peak:
            self._quiet_s = mean_s
        if mean_s <= COST * self._quiet_s:
            self.limit = min(self.limit, self._peak) + 1
            self._quiet_s = min(self._quiet_s, mean_s)  # fewer live answers than when it was measured
        else:
            self.limit = self.limit // 2 if self.limit > 1 else -REST
