"""Models whose workers are not all running at once. Lives on the asyncio thread.

sleep_policy.py decides, `baton serve` stops and starts the workers and reports each change.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from gateway.router.fleet import Fleet
from gateway.router.readiness import find_unready
from gateway.router.worker_view import Role
from gateway.scaling.model_gate import ModelGate
from gateway.scaling.sleep_policy import ModelView, decide
from runtime.events import ModelState, SetAwake

log = structlog.get_logger()


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
        """Takes the new state of a model's workers."""
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
        decision = decide(list(map(_view, gates.values())), self._max_awake, self._sleep_after_s, now)
        for gate in gates.values():
            if gate.is_closed != (gate.name in decision.closed):
                gate.is_closed = not gate.is_closed
        for name in decision.sleep:
            self._send(
                SetAwake(name, False)
            )  # where this fails, nothing has changed: it is asked again at the next look
            log.info("model goes to sleep", model=name)
            gates[name].is_closed = False
            gates[name].change("falling asleep")
            self._leave(gates[name])
        for name in decision.wake:
            self._send(SetAwake(name, True))
            log.info("model wakes", model=name)
            gates[name].change("waking")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [*self._linked_by.values(), *([] if decision.look_again is None else [decision.look_again])]
        if times:
            self._timer = asyncio.get_running_loop().call_later(max(min(times) - now, 0.001), self._fleet.changes.mark)

    def _leave(self, gate: ModelGate) -> None:
        """Notes that the model's workers are about to end, which is not an outage."""
        part = self._part_of(gate)
        part.expect_outage()
        for worker in part.workers():
            self._fleet.leave(worker.role, worker.address)
            closing = asyncio.get_running_loop().create_task(worker.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def _view(gate: ModelGate) -> ModelView:
    return ModelView(gate.name, gate.state, gate.num_inside, gate.waiting_since, gate.idle_since, gate.awake_since)
