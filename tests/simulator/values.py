"""A simulated gateway's clients."""

from collections.abc import Sequence

from gateway.router.engine_client import Tokens
from tests.simulator.world import ViolationError


class Client:
    """Checks what it receives against the undisturbed answer."""

    def __init__(self, name: str, expected: Sequence[int], other: Sequence[int] = ()) -> None:
        """`other`: the answer of another model that may give it as well, whole."""
        self.name = name
        self._other = list(other)
        self.expected = list(expected)
        self.got: list[int] = []
        self.end = ""  # how it ended: "answer", "error ...", "left", "gateway died"
        self.ended_at = 0.0

    def take(self, tokens: Tokens) -> None:
        self.got.extend(tokens.token_ids)
        if self.end:
            raise ViolationError(f"{self.name} gets {tokens} after its end ({self.end})")
        if self.got != self.expected[: len(self.got)] and self._other:
            self.expected, self._other = self._other, []
        if self.got != self.expected[: len(self.got)]:
            raise ViolationError(f"{self.name} got {self.got}, not a prefix of {self.expected}")
        if tokens.finish_reason and self.got != self.expected:
            raise ViolationError(f"{self.name} ended with {len(self.got)} of {len(self.expected)} tokens")

    def finish(self, end: str, now: float) -> None:
        if self.end:
            raise ViolationError(f"{self.name} ended as {end} after {self.end}")
        self.end, self.ended_at = end, now
