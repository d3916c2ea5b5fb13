"""Models whose workers are not all running at once: requests wait until theirs are. Lives on the asyncio thread.

sleep_policy.py decides, `baton serve` stops and starts the workers and reports each change.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from gateway.errors import not_ready
from gateway.router.changes import Changes
from gateway.router.fleet import Fleet
from gateway.router.placement import Role, find_unready
from gateway.router.sleep_policy import ModelView, State, decide
from runtime.events import ModelState, SetAwake

UNREADY_S = 30.0  # that the service is not ready after a wake that failed
log = structlog.get_logger()


class ModelGate:
    """Where the requests of one model wait until it is awake; without `Sleepers` it is always open."""

    def __init__(self, changes: Changes, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.state: State = "awake"
        self.percent = 0  # of the weights that the workers of a waking model have read
        self.reason = ""  # why it could not be woken
        self._changed_at = clock()
        self.is_closed = False  # lets no new requests in, although it is awake: others are to have their turn
        self.num_inside = 0
        self.idle_since = self.awake_since = clock()
        self._changes = changes
        self._clock = clock
        self._failure = ""  # why the last wake failed
        self._wishes: dict[object, float] = {}  # of each request that waits |-> since when, in order

    @property
    def is_open(self) -> bool:
        return self.state == "awake" and not self.is_closed

    @property
    def has_just_failed(self) -> bool:
        """Later it is like asleep: nothing would wake it if readiness probes kept requests away for good."""
        return self.state == "failed" and self._clock() - self._changed_at < UNREADY_S

    def describe(self) -> str:
        """The state in words."""
        if self.state == "waking":
            return f"waking {self.percent} %"
        return f"failed: {self.reason}" if self.state == "failed" else self.state

    def view(self) -> ModelView:
        since = next(iter(self._wishes.values()), None)
        return ModelView(self.name, self.state, self.num_inside, since, self.idle_since, self.awake_since)

    async def enter(self, timeout_s: float) -> float:
        """Let one request in, as `inside` needs; returns the seconds that it waited.

        Raises ApiError, 503, where the model does not wake, or not in time.
        """
        began, ends_at, wish = self._clock(), self._clock() + timeout_s, object()
        was_open = self.is_open
        while not self.is_open:
            self._wishes[wish] = began
            self._changes.mark()
            try:
                is_over = await self._changes.until(
                    lambda: self.is_open or wish not in self._wishes, ends_at - self._clock()
                )
                if not is_over:
                    raise not_ready(f"model '{self.name}' was not awake in time: it is {self.describe()}")
                if wish not in self._wishes:
                    raise not_ready(f"model '{self.name}' could not be woken: {self._failure}")
            finally:
                self._wishes.pop(wish, None)
                self._changes.mark()
        self.num_inside += 1
        return 0.0 if was_open else self._clock() - began

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around a request that was let in."""
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self.idle_since = self._clock()
                self._changes.mark()

    def change(self, state: State, reason: str = "") -> None:
        """Those that wait go on, or get the error."""
        if state == "awake" and self.state != "awake":
            self.awake_since = self.idle_since = self._clock()
        self.state, self.percent, self.reason, self._changed_at = state, 0, reason, self._clock()
        if state == "failed":
            self._failure = reason
            self._wishes.clear()


class Sleepers:
    """Owns the gates of all models, and has workers stopped and started."""

    def __init__(
        self,
        fleet: Fleet,
        gates: Sequence[ModelGate],
        max_awake: int,
        sleep_after_s: float,
        patience_s: float,
        send: Callable[[SetAwake], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The first `max_awake` models are awake. `patience_s`: for a link to a worker that has started.

        `send`: asks for a change, which `learn` hears of.
        """
        self._fleet = fleet
        self._gates = {gate.name: gate for gate in gates}
        self._max_awake = max_awake or len(gates)
        self._sleep_after_s = sleep_after_s
        self._patience_s = patience_s
        self._send = send
        self._clock = clock
        self._linked_by: dict[str, float] = {}  # model |-> when it counts as awake, whether or not we reach a worker
        self._closing = set[asyncio.Task[None]]()
        self._timer: asyncio.TimerHandle | None = None
        for gate in list(gates)[self._max_awake :]:
            gate.change("asleep")
        fleet.changes.follow(self.look)

    def _part_of(self, gate: ModelGate) -> Fleet:
        return self._fleet.parts.get(gate.name, self._fleet)

    def learn(self, event: ModelState) -> None:
        """What has become of a model's workers."""
        gate = self._gates[event.model]
        if event.state == "waking":
            gate.percent = event.percent
            return
        if event.state == "awake":
            self._linked_by[gate.name] = self._clock() + self._patience_s
            known: dict[Role, Sequence[str]] = {"prefill": event.prefill, "decode": event.decode}
            for role, addresses in known.items():
                for address in set(addresses) - self._fleet.of_role(role).keys():
                    self._fleet.join(role, address)
        else:
            self._linked_by.pop(gate.name, None)
            (log.error if event.reason else log.info)(f"model is {event.state}", model=gate.name, reason=event.reason)
            gate.change(event.state, event.reason)
        self._fleet.changes.mark()

    def look(self) -> None:
        """Something has changed, or it is time to: open gates, and have models put to sleep and woken."""
        self._open_linked()
        self._decide()

    def _open_linked(self) -> None:
        for name, linked_by in list(self._linked_by.items()):
            gate = self._gates[name]
            if find_unready(self._part_of(gate).views()) is None or self._clock() >= linked_by:
                del self._linked_by[name]
                log.info("model is awake", model=name)
                gate.change("awake")

    def _decide(self) -> None:
        gates, now = self._gates, self._clock()
        decision = decide([gate.view() for gate in gates.values()], self._max_awake, self._sleep_after_s, now)
        for gate in gates.values():
            if gate.is_closed != (gate.name in decision.closed):
                gate.is_closed = not gate.is_closed
        for name in decision.sleep:
            log.info("model goes to sleep", model=name)
            gates[name].is_closed = False
            gates[name].change("falling asleep")
            self._leave(gates[name])
            self._send(SetAwake(name, False))
        for name in decision.wake:
            log.info("model wakes", model=name)
            gates[name].change("waking")
            self._send(SetAwake(name, True))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [*self._linked_by.values(), *([] if decision.look_again is None else [decision.look_again])]
        if times:
            self._timer = asyncio.get_running_loop().call_later(max(min(times) - now, 0.001), self._fleet.changes.mark)

    def _leave(self, gate: ModelGate) -> None:
        """Its workers are about to end, which is no outage."""
        part = self._part_of(gate)
        part.expect_outage()
        for worker in part.workers():
            self._fleet.leave(worker.role, worker.address)
            closing = asyncio.get_running_loop().create_task(worker.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
