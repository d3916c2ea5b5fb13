"""Requests for models that are not awake, through the real router in virtual time; the test is `baton serve`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gateway.router.admission import Admission
from gateway.router.placer import Placer
from gateway.router.router import Router
from gateway.router.worker_client import POLL_S
from gateway.scaling.model_gate import UNREADY_S, ModelGate
from gateway.scaling.sleepers import Sleepers
from runtime.events import ModelState, SetAwake
from tests.support.fake_workers import FakeDecode
from tests.support.virtual_fleet import Client, VirtualFleet, virtual_fleet, wanted

PATIENCE_S, TIMEOUT_S = 3.0, 60.0


class Models:
    """One decode worker for each model: D1 of "a", which is awake, D2 of "b" and so on, which do not run yet."""

    def __init__(self, fleet: VirtualFleet, names: str, max_awake: int, sleep_after_s: float) -> None:
        self.fleet, self.sent = fleet, list[SetAwake]()
        self._num_answered: dict[int, int] = {}  # of sessions, by worker
        clock = fleet.loop.time
        self.gates = {name: ModelGate(fleet.fleet.changes, name, clock) for name in names}
        self.addresses = {name: f"D{number}" for number, name in enumerate(names, start=1)}
        self.routers: dict[str, Router] = {}
        for decode, (name, gate) in zip(fleet.decodes, self.gates.items(), strict=True):
            decode.peer.model = name
            part = fleet.fleet.add_part(name, 0) if len(names) > 1 else fleet.fleet
            registry, placer = CollectorRegistry(), Placer(expects_prefill=False)
            self.routers[name] = Router(part, Admission(8), TIMEOUT_S, PATIENCE_S, registry, False, placer, clock, gate)
        self.sleepers = Sleepers(
            fleet.fleet, list(self.gates.values()), max_awake, sleep_after_s, PATIENCE_S, self.sent.append, clock
        )
        for name in names[max_awake or len(names) :]:
            fleet.loop.run(partial(self._forget, name))
            fleet.kill(self.worker(name))
        fleet.start()
        fleet.loop.run(self.sleepers.look)

    def _forget(self, name: str) -> None:
        self.fleet.fleet.leave("decode", self.addresses[name])

    def worker(self, name: str) -> FakeDecode:
        """Its newest one."""
        return [one for one in self.fleet.decodes if one.peer.model == name][-1]

    def ask(self, name: str, request: str = "r", **fields: Any) -> Client:
        self.fleet.router = self.routers[name]
        return self.fleet.ask(wanted(request, max_tokens=1, **fields))

    def tell(self, name: str, state: str, **fields: object) -> None:
        """What `baton serve` reports."""
        event = ModelState(name, state, **fields)  # type: ignore[arg-type]
        self.fleet.loop.run(lambda: self.sleepers.learn(event))
        self.fleet.run()

    def end_workers(self, name: str) -> None:
        self.fleet.kill(self.worker(name))
        self.tell(name, "asleep")

    def start_workers(self, name: str) -> None:
        """On another port, as at the first start."""
        address = self.addresses[name] = f"{self.addresses[name]}'"
        after = self.fleet.replace(self.worker(name), address)
        after.peer.model = name
        self.fleet.workers[address] = after
        self.tell(name, "awake", decode=(address,))
        self.fleet.run(0.5)

    def answer(self, name: str) -> None:
        """All that its worker has."""
        sessions = self.worker(name).sessions
        for session in sessions[self._num_answered.get(id(sessions), 0) :]:
            session.say([7], "length")
        self._num_answered[id(sessions)] = len(sessions)
        self.fleet.run()


@contextmanager
def models(names: str = "ab", max_awake: int = 1, sleep_after_s: float = 0.0) -> Iterator[Models]:
    with virtual_fleet(decode=len(names), is_started=False) as fleet:
        yield Models(fleet, names, max_awake, sleep_after_s)


def test_a_request_wakes_its_model_and_has_the_time_that_it_takes() -> None:
    with models() as both:
        assert [gate.describe() for gate in both.gates.values()] == ["awake", "asleep"]
        client, other = both.ask("b"), both.ask("b", "other")
        assert both.sent == [SetAwake("a", False)], "a is idle"
        assert "D1" not in both.fleet.fleet.decode, "its end is no outage"
        both.fleet.run(1.0)
        both.end_workers("a")
        assert both.sent[1:] == [SetAwake("b", True)]
        both.tell("b", "waking", percent=40)
        assert both.gates["b"].describe() == "waking 40 %"
        both.fleet.run(5 * PATIENCE_S)
        assert client.error is None and not client.parts, "patience begins when it is awake"
        both.start_workers("b")
        both.answer("b")
        assert client.tokens == other.tokens == [7]
        timing = client.parts[-1].timing
        assert timing is not None and timing.wake_s >= 5 * PATIENCE_S + 1.0 and timing.queue_s < 1.0
        again = both.ask("b", "again")
        both.answer("b")
        assert again.parts[-1].timing and again.parts[-1].timing.wake_s == 0.0
        assert len(both.sent) == 2


def test_a_busy_model_is_not_put_to_sleep() -> None:
    with models() as both:
        busy, client = both.ask("a"), both.ask("b")
        both.fleet.run(5.0)
        assert both.sent == []
        both.answer("a")
        assert busy.tokens == [7] and both.sent == [SetAwake("a", False)]
        late = both.ask("a", "late")
        both.end_workers("a")
        both.start_workers("b")
        both.answer("b")
        assert client.tokens == [7] and both.sent[-1] == SetAwake("b", False), "a's request has its turn"
        both.end_workers("b")
        both.start_workers("a")
        both.answer("a")
        assert late.tokens == [7]


def test_a_model_that_is_always_asked_lets_others_have_their_turn() -> None:
    with models() as both:
        first, client = both.ask("a"), both.ask("b")
        both.fleet.run(11.0)
        held = both.ask("a", "held")
        both.answer("a")
        assert first.tokens == [7] and not held.parts and both.sent == [SetAwake("a", False)]
        both.end_workers("a")
        both.start_workers("b")
        both.answer("b")
        both.end_workers("b")
        both.start_workers("a")
        both.answer("a")
        assert client.tokens == held.tokens == [7]


def test_a_wake_that_fails_is_a_503_with_the_reason_and_is_tried_again() -> None:
    with models() as both:
        client = both.ask("b")
        both.end_workers("a")
        both.tell("b", "failed", reason="no memory")
        assert client.error is not None and client.error.status == 503
        assert client.error.message == "model 'b' could not be woken: no memory"
        assert both.gates["b"].describe() == "failed: no memory" and both.sent[1:] == [SetAwake("b", True)]
        assert both.routers["b"].readiness() is not None and both.routers["a"].readiness() is None
        client = both.ask("b")
        assert both.sent[2:] == [SetAwake("b", True)]
        both.start_workers("b")
        both.answer("b")
        assert client.tokens == [7]


def test_after_a_wake_that_failed_the_service_is_ready_again_soon_so_that_a_request_can_come() -> None:
    with models() as both:
        both.ask("b")
        both.end_workers("a")
        both.tell("b", "failed", reason="no memory")
        router = both.routers["b"]
        assert router.readiness() == "the model could not be woken: no memory" and not router.can_serve()
        both.fleet.run(UNREADY_S)
        assert router.readiness() is None and not router.can_serve(), "the next request wakes it"


def test_a_deadline_holds_while_the_model_is_not_awake() -> None:
    with models() as both:
        busy, late = both.ask("a"), both.ask("b", deadline_s=0.5)
        both.fleet.run(0.5)
        assert late.error is not None and (late.error.status, late.error.code) == (429, "deadline")
        both.answer("a")
        assert busy.tokens == [7]


def test_waiting_ends_with_the_requests_time_or_its_client() -> None:
    with models() as both:
        busy, late, gone = both.ask("a"), both.ask("b"), both.ask("b", "gone")
        gone.leave()
        both.fleet.run(TIMEOUT_S + 1)
        assert late.error is not None and (late.error.status, late.error.code) == (503, "not_ready")
        assert late.error.message == "model 'b' was not awake in time: it is asleep"
        assert busy.error is not None and busy.error.status == 504
        both.fleet.run(1.0)
        assert both.sent == [], "b is not wanted any more"


def test_a_model_sleeps_when_nobody_asks_for_a_while_also_alone() -> None:
    with models("a", max_awake=0, sleep_after_s=20.0) as one:
        one.fleet.run(15.0)
        client = one.ask("a")
        one.answer("a")
        one.fleet.run(19.0)
        assert client.tokens == [7] and one.sent == []
        one.fleet.run(1.5)
        assert one.sent == [SetAwake("a", False)]
        client = one.ask("a")
        one.end_workers("a")
        assert one.sent[1:] == [SetAwake("a", True)], "it came while the workers were ending"
        one.start_workers("a")
        one.answer("a")
        assert client.tokens == [7]


@pytest.mark.parametrize("is_awake", [False, True])
def test_what_could_not_be_asked_for_is_asked_for_at_the_next_look(is_awake: bool) -> None:
    with models("ab") as both, capture_logs():
        send = both.sleepers._send

        def fail_once(event: SetAwake) -> None:
            if event.is_awake is not is_awake:
                send(event)
                return
            both.sleepers._send = send
            raise OSError("broken pipe")

        both.sleepers._send = fail_once
        client = both.ask("b")
        both.fleet.run(POLL_S)
        both.end_workers("a")
        both.fleet.loop.run(both.fleet.fleet.changes.mark)
        both.fleet.run()
        assert both.sent == [SetAwake("a", False), SetAwake("b", True)]
        both.start_workers("b")
        both.answer("b")
        assert client.tokens == [7]


def test_a_prompt_that_decode_computes_for_want_of_a_prefill_worker_is_named() -> None:
    with virtual_fleet(prefill=1) as fleet:
        handed = fleet.ask("handed")
        fleet.decodes[0].sessions[0].say([7], "length")
        fleet.run()
        fleet.kill(fleet.prefills[0])
        fleet.run(11.0)
        client = fleet.ask(wanted("alone", prompt=range(40)))
        fleet.decodes[0].sessions[-1].say([7], "length")
        fleet.run()
        assert handed.notes == []
        assert client.notes == ["no prefill worker is alive: a decode worker computes the prompt"]
        assert client.parts[-1].timing and client.parts[-1].timing.prefill_reason == "no prefill worker is alive"
