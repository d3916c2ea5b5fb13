"""What a forward takes by its rows: measured at start, then kept up to date by every step. Pure: seconds come in."""

from dataclasses import dataclass, field

from decode_worker.speculation.lengths import CostCurve

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of a forward are counted as the next larger of these
NEWEST_SHARE = 0.1  # of the newest step in the average; the last 20 or so decide
FORGOTTEN_STEPS = 1000  # steps after which a size that was not met again is forgotten


@dataclass(slots=True)
class CostMeter:
    """Averages of measured forwards over the last steps. Not thread-safe: the engine thread's.

    A measurement counts less with each step after it, and is forgotten in the end. Otherwise a bad one could make
    drafts look too expensive for ever: no step would draft, and so none would measure again.
    """

    _seconds: dict[int, float] = field(default_factory=dict)  # size |-> average
    _met: dict[int, int] = field(default_factory=dict)  # size |-> step in which it was measured last
    _steps: int = 0

    def note(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took `seconds`. Ones larger than any size are prompts, which do not count here."""
        size = next((size for size in SIZES if rows <= size), None)
        if size is None:
            return
        age = max(1, self._steps - self._met[size]) if self._is_known(size) else FORGOTTEN_STEPS
        before = self._seconds.get(size, seconds)
        self._met[size] = self._steps
        self._seconds[size] = seconds + (1 - NEWEST_SHARE) ** age * (before - seconds)

    def end_step(self) -> None:
        """An engine step is over, whatever it measured."""
        self._steps += 1

    def _is_known(self, size: int) -> bool:
        return size in self._met and self._steps - self._met[size] <= FORGOTTEN_STEPS

    def curve(self) -> CostCurve | None:
        """The averages as a curve that never falls; None while nothing is known."""
        points = []
        highest = 0.0
        for size in filter(self._is_known, SIZES):
            highest = max(highest, self._seconds[size])
            points.append((size, highest))
        return CostCurve(tuple(points)) if points else None
