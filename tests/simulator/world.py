"""Virtual time, processes that crash and pause at any step, and the network between them. Knows no protocol.

The network is harsher than gRPC: a call's messages may be late, lost, duplicated or reordered, and reach whichever
incarnation has the address by then. Only a stream keeps its order; losing a message breaks it.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Action = Callable[[], None]

KEEPALIVE_S = 1.5  # until a connection that lost a message counts as broken
MAX_EVENTS = 60_000  # more than any schedule takes; one that needs more never settles


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a caller gets instead of an answer: no answer came, or a refusal."""

    why: str


@dataclass(slots=True)
class Faults:
    """How bad the network is; `cut` changes over time."""

    loss: float = 0.0
    doubled: float = 0.0
    late: float = 0.0  # share of messages and steps that take seconds
    slow_reads: float = 0.0  # like `late`, for reads, page by page
    slow_steps: float = 0.0  # like `late`, for prefill steps
    slow_decode_steps: float = 0.0  # like `late`, for decode steps
    failing: float = 0.0  # share of launches
    cut: set[frozenset[str]] = field(default_factory=set)  # pairs of names that cannot communicate now


class World:
    """One schedule: everything depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = Faults()
        self.trace: list[tuple[float, str, tuple[Any, ...]]] = []
        self.ambushes: dict[str, tuple[int, Action]] = {}  # target |-> what happens before its nth next message arrives
        self._heap: list[tuple[float, int, Process, int, Action]] = []
        self.num_events = 0
        self.is_over = False  # although processes go on
        self.violation: ViolationError | None = None  # found where raising it may not end the run

    def note(self, what: str, *details: Any) -> None:
        """Record for the trace; formatted only when shown."""
        self.trace.append((self.now, what, details))

    def at(self, delay: float, process: "Process", epoch: int, action: Action) -> None:
        """Have `process` act after `delay`, if it is still in `epoch` (-1: in any)."""
        self.num_events += 1
        heapq.heappush(self._heap, (self.now + delay, self.num_events, process, epoch, action))

    def run(self) -> None:
        """Run until no event is left, or it is over."""
        while self._heap and not self.is_over:
            self.now, _, process, epoch, action = heapq.heappop(self._heap)
            process.do(epoch, action)
            if self.violation is not None:
                raise self.violation
            if self.num_events > MAX_EVENTS:
                raise ViolationError(f"no rest after {MAX_EVENTS} events")

    def delay(self) -> float:
        """Duration of a message or a copy."""
        rng = self.rng
        return rng.random() * 3.0 if rng.random() < self.faults.late else 0.001 + rng.random() * 0.02

    def slow_delay(self, share: float) -> float:
        """A duration; `share` of them take seconds."""
        return self.rng.random() * 3.0 if self.rng.random() < share else self.delay()

    def is_cut(self, one: str, other: str) -> bool:
        return bool(self.faults.cut) and frozenset((one, other)) in self.faults.cut

    def is_lost(self, one: str, other: str) -> bool:
        return self.is_cut(one, other) or self.rng.random() < self.faults.loss

    def send(self, source: "Process", target: "Process", action: Action, if_down: Action = lambda: None) -> bool:
        """Send one message, perhaps twice. False if it is lost, which a real sender cannot know."""
        if self.is_lost(source.name, target.name):
            return False

        def arrive() -> None:
            (action if target.is_up else if_down)()

        self.at(self._ambush(target) or self.delay(), target, -1, arrive)
        if self.rng.random() < self.faults.doubled:
            self.at(self.delay(), target, -1, arrive)
        return True

    def _ambush(self, target: "Process") -> float:
        """How long the message is delayed by what happens before it; 0 if nothing does."""
        count, action = self.ambushes.pop(target.name, (0, None))
        if action is None:
            return 0.0
        if count > 1:
            self.ambushes[target.name] = (count - 1, action)
            return 0.0
        action()
        return 0.1 + self.rng.random() * 1.5

    def call(
        self,
        source: "Process",
        target: "Process",
        serve: Callable[[Callable[[Any], None]], None],
        then: Callable[[Any], None],
        timeout_s: float,
    ) -> "Call":
        """`serve(answer)` at the target; `then` gets its answer or a Failure, exactly once if the caller lives."""
        call = Call(self, source, target, source.epoch, then)
        target.incoming.append(call)
        if not self.send(source, target, lambda: serve(call.answer), lambda: call.fail("no connection")):
            source.later(min(timeout_s, KEEPALIVE_S), lambda: call.fail("connection lost"))
        source.later(timeout_s, lambda: call.fail("deadline"))
        return call


@dataclass(slots=True, eq=False)
class Call:
    """One call in flight."""

    world: World
    source: "Process"
    target: "Process"
    epoch: int  # of the caller
    then: Callable[[Any], None]
    is_over: bool = False

    def answer(self, value: Any) -> None:
        """Called by the target."""
        if self.world.is_lost(self.target.name, self.source.name):
            self.world.at(KEEPALIVE_S, self.source, self.epoch, lambda: self._finish(Failure("connection lost")))
        else:
            self.world.at(self.world.delay(), self.source, self.epoch, lambda: self._finish(value))

    def lose_connection(self) -> None:
        """The effect of a cut on a call in flight, unless it heals soon."""
        if self.world.is_cut(self.source.name, self.target.name):
            self._finish(Failure("connection lost"))

    def fail(self, why: str) -> None:
        if self.is_over:
            return
        self.world.at(0.001, self.source, self.epoch, lambda: self._finish(Failure(why)))

    def _finish(self, value: Any) -> None:
        if not self.is_over:
            self.is_over = True
            self.target.incoming.remove(self)
            self.then(value)


class Process:
    """The process at one address: at most one incarnation at a time."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.epoch = 0
        self.is_up = True
        self.is_paused = False
        self.incoming: list[Call] = []  # calls that wait for an answer from here
        self._backlog: list[tuple[int, Action]] = []  # events during a pause
        self.boot()

    @property
    def incarnation(self) -> str:
        return f"{self.name}#{self.epoch}"

    def boot(self) -> None:
        """Start with empty state."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise if an invariant of this process is violated. Called after each of its events."""

    def lose_peer(self, name: str, epoch: int) -> None:
        """The connections to an incarnation of a peer are closed."""

    def later(self, delay: float, action: Action) -> None:
        self.world.at(delay, self, self.epoch, action)

    def do(self, epoch: int, action: Action) -> None:
        if epoch not in (-1, self.epoch):
            return
        if self.is_paused:
            self._backlog.append((epoch, action))
            return
        action()
        if self.is_up:
            self.check()

    def crash(self) -> None:
        self.is_up, self.is_paused = False, False
        self.epoch += 1
        self._backlog.clear()
        for call in self.incoming:
            call.fail("connection reset")

    def restart(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.boot()

    def pause(self) -> None:
        self.is_paused = self.is_up

    def resume(self) -> None:
        self.is_paused = False
        backlog, self._backlog = self._backlog, []
        for epoch, action in backlog:
            self.do(epoch, action)
