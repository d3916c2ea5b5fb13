"""What a forward takes by its rows: measured at start, then kept up to date by every step. Pure: seconds come in."""

from dataclasses import dataclass, field

from decode_worker.speculation.lengths import CostCurve

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of a forward are counted as the next larger of these
NEWEST_SHARE = 0.1  # of the newest measurement in the average; the last 20 or so decide
FORGOTTEN_STEPS = 1000  # steps after which a size that was not met again is forgotten


@dataclass(slots=True)
class CostMeter:
    """Averages of measured forwards. Not thread-safe: the engine thread's.

    What was not met for long is forgotten. Else one bad measurement could make guesses look too dear for ever: nobody
    would guess, and so nobody would measure again.
    """

    _seconds: dict[int, float] = field(default_factory=dict)  # size |-> average
    _met: dict[int, int] = field(default_factory=dict)  # size |-> step in which it was measured last
    _steps: int = 0

    def note(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took `seconds`. Larger ones than any size are prompts, which tell nothing here."""
        size = next((size for size in SIZES if rows <= size), None)
        if size is None:
            return
        before = self._seconds[size] if self._is_known(size) else None
        self._met[size] = self._steps
        self._seconds[size] = seconds if before is None else before + NEWEST_SHARE * (seconds - before)

    def end_step(self) -> None:
        """An engine step is over, whatever it measured."""
        self._steps += 1

    def _is_known(self, size: int) -> bool:
        return size in self._met and self._steps - self._met[size] <= FORGOTTEN_STEPS

    def curve(self) -> CostCurve | None:
        """The averages as a curve that nowhere falls; None while nothing is known."""
        points = []
        highest = 0.0
        for size in filter(self._is_known, SIZES):
            highest = max(highest, self._seconds[size])
            points.append((size, highest))
        return CostCurve(tuple(points)) if points else None
