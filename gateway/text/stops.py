"""Stop strings found in text that arrives in pieces.

Pure: knows text only, no tokens. Where the text is cut does not depend on how it was split into pieces.
"""

from collections.abc import Sequence


class _Automaton:
    """Knuth-Morris-Pratt: how many characters of `stop` the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * (len(stop) + 1)  # length matched |-> next shorter length that the same text matches
        for length in range(1, len(stop)):
            self._fallback[length + 1] = self._follow(self._fallback[length], stop[length])

    def step(self, char: str) -> int:
        """Takes one character; returns the length of the stop string when it is now complete, else 0."""
        self.matched = self._follow(self.matched, char)
        return self.matched if self.matched == len(self.stop) else 0

    def _follow(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback[length]
        return length + 1 if self.stop[length] == char else 0


class StopStrings:
    """Passes text through until a stop string is complete; text that may be the start of one is held back.

    The stop string completed first wins; of several completed by the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""  # the longest end of the text so far that starts a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that may be shown now and whether a stop string was met. Not to be called after it was."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, False
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            if length := max([automaton.step(text[end - 1]) for automaton in self._automata]):
                self._held = ""
                return text[: end - length], True
        shown = len(text) - max(automaton.matched for automaton in self._automata)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held
