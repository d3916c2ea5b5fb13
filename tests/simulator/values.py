"""A simulated gateway's clients, and its state of one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.ring.attempt_state import AttemptState
from gateway.ring.generation import Tokens
from gateway.ring.queue import Waiter
from gateway.ring.request_machine import Request
from tests.simulator.world import ViolationError


class Client:
    """Checks what it receives against the undisturbed answer."""

    def __init__(self, name: str, expected: Sequence[int]) -> None:
        self.name = name
        self.expected = list(expected)
        self.got: list[int] = []
        self.end = ""  # how it ended: "answer", "error ...", "left", "gateway died"
        self.ended_at = 0.0

    def take(self, tokens: Tokens) -> None:
        self.got.extend(tokens.token_ids)
        if self.end:
            raise ViolationError(f"{self.name} gets {tokens} after its end ({self.end})")
        if self.got != self.expected[: len(self.got)]:
            raise ViolationError(f"{self.name} got {self.got}, not a prefix of {self.expected}")
        if tokens.finish_reason and self.got != self.expected:
            raise ViolationError(f"{self.name} ended with {len(self.got)} of {len(self.expected)} tokens")

    def finish(self, end: str, now: float) -> None:
        if self.end:
            raise ViolationError(f"{self.name} ended as {end} after {self.end}")
        self.end, self.ended_at = end, now


@dataclass(slots=True, eq=False)
class Work:
    """One request: in the queue, or in an attempt."""

    request: Request
    client: Client
    waiter: Waiter | None = None
    attempt: AttemptState | None = None
    run_call: int = 0  # its prefill call; 0: none
