"""What a simulated gateway holds: clients, links to workers, requests. Values only; gateway.py has the verbs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.generation import Tokens
from gateway.ring.policy import WorkerView
from gateway.ring.request_events import Lost, News
from gateway.ring.request_machine import Request
from tests.simulator.decode import SimDecode
from tests.simulator.model import Ticket
from tests.simulator.prefill import HEARTBEAT_S, SimPrefill
from tests.simulator.world import ViolationError


class Client:
    """Whoever asked: checks what it gets against the undisturbed answer."""

    def __init__(self, name: str, expected: Sequence[int]) -> None:
        self.name = name
        self.expected = list(expected)
        self.got: list[int] = []
        self.end = ""  # how it ended: "answer", "error ...", "left", "gateway died"
        self.ended_at = 0.0

    def take(self, tokens: Tokens) -> None:
        self.got.extend(tokens.token_ids)
        if self.end:
            raise ViolationError(f"{self.name} hears {tokens} after its end ({self.end})")
        if self.got != self.expected[: len(self.got)]:
            raise ViolationError(f"{self.name} got {self.got}, not a prefix of {self.expected}")
        if tokens.finish_reason and self.got != self.expected:
            raise ViolationError(f"{self.name} ended with {len(self.got)} of {len(self.expected)} tokens")

    def finish(self, end: str, now: float) -> None:
        if self.end:
            raise ViolationError(f"{self.name} ended as {end} after {self.end}")
        self.end, self.ended_at = end, now


@dataclass(slots=True, eq=False)
class Link:
    """What the gateway knows of one worker."""

    role: Literal["prefill", "decode"]
    worker: SimPrefill | SimDecode
    incarnation: str = ""
    heard: float = -float("inf")
    free_pages: int = 0
    num_mine: int = 0
    is_full: bool = False
    is_doubted: bool = False  # a call found nobody since it was last heard
    stream: str = ""  # open Steps stream, and who is behind it
    stream_incarnation: str = ""

    def view(self, now: float) -> WorkerView:
        is_silent = now - self.heard > HEARTBEAT_S
        is_alive = not (is_silent or self.is_doubted) and (self.role == "prefill" or bool(self.stream))
        return WorkerView(
            self.role, self.worker.name, self.incarnation, b"", is_alive, "" if is_alive else "is silent",
            self.worker.max_running, self.num_mine, self.is_full, self.free_pages,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Work:
    """One request and what its present attempt holds."""

    request: Request
    client: Client
    held: list[Link] = field(default_factory=list)
    decode: Link | None = None
    prefill: Link | None = None
    stream: str = ""
    handle: int = 0  # 0: no session
    is_over: bool = False  # the session's last news has come
    inbox: list[News | Lost] = field(default_factory=list)  # kept until Reserve is answered, as in attempt.py
    ticket: Ticket | None = None
    run_call: int = 0
    is_left: bool = False  # by its client
