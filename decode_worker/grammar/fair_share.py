"""The order in which an engine step works on its answers' grammars when it has no time for all of them. Pure."""

from collections.abc import Sequence

UNKNOWN_S = 0.005  # CPU time assumed for an answer's first turn, more than honest grammars need


class FairShare:
    """Remembers what each answer's last turn cost, and how many steps it has waited since.

    Cheap answers come first, so that expensive ones do not delay them. Waiting makes an answer cheaper, so that each
    gets its turn.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, int]] = {}  # answer |-> CPU seconds, steps waited

    def order(self, answers: Sequence[int]) -> list[int]:
        """The same, the most urgent first, ties in the given order. Forgets answers that are not given."""
        self._known = {answer: self._known.get(answer, (UNKNOWN_S, 0)) for answer in answers}
        return sorted(answers, key=self._cost)

    def took(self, answer: int, cpu_s: float) -> None:
        """Its turn took so much CPU time."""
        self._known[answer] = cpu_s, 0

    def waited(self, answer: int) -> None:
        """The step had no time for it."""
        cpu_s, num_waited = self._known[answer]
        self._known[answer] = cpu_s, num_waited + 1

    def _cost(self, answer: int) -> float:
        cpu_s, num_waited = self._known[answer]
        return cpu_s / (1 + num_waited)
