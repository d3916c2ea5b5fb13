"""How many answers of batches' lines run beside live ones. Pure.

They are to cost live answers little time between tokens, which depends on the machine: on a GPU a row more is nearly
free, on a CPU it is not. So it is measured: the mean gap between their tokens while no line runs, and while some do.

    no live request for CALM_S ─► any number of answers
    beside live answers        ─► up to `limit`: more while the mean gap is at most COST times the quiet one, else half
    not even one line          ─► one line at a time, for DUTY of the time: a batch goes on whatever the load
"""

from dataclasses import dataclass
from math import inf

CALM_S = 5.0
WINDOW_S, WINDOW_GAPS = 0.5, 40  # least to measure over
COST = 1.05  # the promise is 1.10 for the 99th percentile; rows cost the mean as much
DUTY = 0.05
RESERVE = 0.25  # of all places stays free for live requests


@dataclass(slots=True)
class Gaps:
    """Times between tokens of live answers."""

    total_s: float = 0.0
    count: int = 0

    def add(self, total_s: float, count: int) -> None:
        self.total_s += total_s
        self.count += count


@dataclass(slots=True)
class _Window(Gaps):
    """Those between two looks, all with lines or all without."""

    seconds: float = 0.0
    peak: int = 0  # most answers of lines at once


def count_room(num_places: int, num_free: int, num_waiting: int) -> int:
    """Answers of lines that may start now: places beyond the reserve, a part at once, none while requests wait."""
    room = num_free - max(int(RESERVE * num_places), 1)
    return 0 if num_waiting or room <= 0 else max(room // 4, 1)


class Pace:
    """Decides on the number of lines by what it sees at each `look`."""

    def __init__(self) -> None:
        self.num_answers = 0  # that run
        self.limit = 1  # beside live answers; 0: one at a time
        self.quiet_s = 0.0  # mean gap while no line runs; 0: not measured
        self._looked = (0.0, 0.0, 0)  # when, and the gaps then
        self._peak = 0  # most of them at once since then
        self._live_at = self._token_at = -inf  # when a live request was last seen, and its tokens
        self._rests_until = -inf
        self._quiet, self._beside = _Window(), _Window()

    def begin(self) -> None:
        self.num_answers += 1
        self._peak = max(self._peak, self.num_answers)

    def end(self, now: float, began: float) -> None:
        self.num_answers -= 1
        if not self.limit:
            self._rests_until = max(self._rests_until, now + (now - began) * (1 / DUTY - 1))

    def look(self, now: float, num_live: int, gaps: Gaps) -> float:
        """The most of them that may run now. `gaps`: of all live answers since the start."""
        is_calm = now - self._live_at > CALM_S
        self._measure(now, gaps)
        if num_live:
            if is_calm:
                self._rests_until = now + CALM_S
            self._live_at = now
        elif is_calm:
            return inf
        if not self.quiet_s and now - self._token_at < CALM_S:
            return 0  # measured first
        if self.limit:
            return self.limit
        return 1 if now >= self._rests_until else 0

    def _measure(self, now: float, gaps: Gaps) -> None:
        (at, total_s, count), self._looked = self._looked, (now, gaps.total_s, gaps.count)
        peak, self._peak = self._peak, self.num_answers
        if gaps.count == count:
            return
        self._token_at = now
        window = self._beside if peak else self._quiet
        window.add(gaps.total_s - total_s, gaps.count - count)
        window.seconds, window.peak = window.seconds + now - at, max(window.peak, peak)
        if window.seconds < WINDOW_S or window.count < WINDOW_GAPS:
            return
        mean_s = window.total_s / window.count
        if window is self._quiet:
            self.quiet_s = (self.quiet_s + mean_s) / 2 if self.quiet_s else mean_s
            self._quiet = _Window()
        elif self.quiet_s:
            if mean_s > COST * self.quiet_s:
                self.limit //= 2
            elif window.peak >= self.limit:
                self.limit += max(self.limit // 4, 1)
            self.quiet_s = min(self.quiet_s, mean_s)  # fewer live answers than when it was measured
            self._beside = _Window()
