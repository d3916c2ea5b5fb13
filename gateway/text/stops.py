"""Finds stop strings in text that arrives in pieces; how it is split does not matter. Pure."""

from collections.abc import Sequence
from functools import lru_cache


class _Automaton:
    """Knuth-Morris-Pratt: how many characters of `stop` the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallbacks(stop)

    def step(self, char: str) -> int:
        """Takes one character. Returns the length of the stop string if it is now complete, else 0."""
        self.matched = _follow(self.stop, self._fallback, self.matched, char)
        return self.matched if self.matched == len(self.stop) else 0


@lru_cache(256)  # the choices of a request share them
def _fallbacks(stop: str) -> Sequence[int]:
    """Length matched |-> next shorter length that the same text matches."""
    fallbacks = [0] * (len(stop) + 1)
    for length in range(1, len(stop)):
        fallbacks[length + 1] = _follow(stop, fallbacks, fallbacks[length], stop[length])
    return fallbacks


def _follow(stop: str, fallbacks: Sequence[int], length: int, char: str) -> int:
    """Length matched after one more character."""
    while length and stop[length] != char:
        length = fallbacks[length]
    return length + 1 if stop[length] == char else 0


class StopStrings:
    """Passes text through until a stop string is complete; text that may be the start of one is held back.

    The stop string completed first wins; of several completed by the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self.met: str | None = None  # the stop string that was found
        self._held = ""  # the longest suffix of the text so far that begins a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Returns (text that may be shown now, whether a stop string was found). Do not call it after one was found."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, False
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            if length := max([automaton.step(text[end - 1]) for automaton in self._automata]):
                self._held, self.met = "", text[end - length : end]
                return text[: end - length], True
        shown = len(text) - max(automaton.matched for automaton in self._automata)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Returns the text held back. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held
