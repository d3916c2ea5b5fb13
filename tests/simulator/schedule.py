"""One seed, one schedule: a small fleet, a few requests, a few faults, and what must hold at the end."""

import random
from dataclasses import dataclass
from typing import Any

from gateway.generation import Generation, Sampling
from gateway.ring.request_machine import Request
from tests.simulator.decode import SimDecode
from tests.simulator.gateway import PATIENCE_S, TIMEOUT_S, SimGateway
from tests.simulator.model import answer
from tests.simulator.prefill import SimPrefill
from tests.simulator.values import Client
from tests.simulator.world import KEEPALIVE_S, Faults, Process, ViolationError, World

FAULTS_END_S = 2.0
MAX_PAUSE_S = 8.0
SLACK_S = 0.1  # a message within a process


@dataclass(frozen=True, slots=True)
class Outcome:
    """One schedule, over."""

    seed: int
    error: str  # the violation; empty when all held
    ends: tuple[str, ...]  # of the requests
    num_events: int
    trace: tuple[tuple[float, str, tuple[Any, ...]], ...]


class Schedule:
    """Everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        rng = self.world.rng
        self.nobody = _Nobody(self.world, "world")
        self.has_twins = seed % 4 == 0  # several requests for the same prompt, as for n > 1
        self.is_calm = rng.random() < 0.1
        if not self.is_calm:
            kinds = rng.choice([(0.0, 0.0, 0.0), (0.03, 0.03, 0.03), (0.0, 0.05, 0.0), (0.0, 0.0, 0.08)])
            self.world.faults = Faults(*kinds, rng.choice([0.0, 0.3]), rng.choice([0.0, 0.3]))
        num_pages, max_running = rng.randint(8, 12), rng.randint(2, 4)
        decodes = [SimDecode(self.world, f"D{n}", num_pages, max_running) for n in range(rng.randint(1, 2))]
        by_name = {decode.name: decode for decode in decodes}
        prefills = [
            SimPrefill(self.world, f"P{n}", num_pages // 2, max_running, by_name) for n in range(rng.randint(1, 2))
        ]
        self.gateways = [SimGateway(self.world, f"G{n}", prefills, decodes) for n in range(rng.choice([1, 1, 2]))]
        self.workers: list[SimPrefill | SimDecode] = [*prefills, *decodes]
        self.processes: list[Process] = [*self.gateways, *self.workers]
        self.clients: list[tuple[Client, float]] = []  # and when it asked
        self.last: tuple[tuple[int, ...], float, SimGateway] | None = None  # the request before: prompt, time, gateway
        lengths = rng.choice([range(1, 10), [rng.randint(4, 9)]])  # offers of equal prompts are easily mistaken
        for number in range(rng.randint(2, 5)):
            self._plan_request(number, rng.choice(lengths), rng)
        if not self.is_calm:
            center = rng.random() * FAULTS_END_S  # faults that come together are the hard ones
            for _ in range(rng.randint(1, 4)):
                self._plan_fault(rng, center + rng.random() * rng.choice([0.3, FAULTS_END_S]))
        for gateway in self.gateways:
            gateway.local_prefill_max_tokens = rng.choice([0, 0, 2])
            gateway.boot()

    def _plan_request(self, number: int, num_prompt: int, rng: random.Random) -> None:
        prompt = tuple(rng.randrange(100) for _ in range(num_prompt))
        twin = self.last if self.has_twins else None
        if twin is not None:
            prompt = twin[0]
        expected = answer(prompt, rng.randint(1, 6))
        max_tokens = len(expected)
        stop = frozenset[int]()
        if rng.random() < 0.2:
            expected = expected[: rng.randint(1, max_tokens)]
            stop = frozenset(expected[-1:])
        name = f"r{number}"
        client = Client(name, expected)
        generation = Generation(name, prompt, max_tokens, Sampling(0.0, 1.0, 0, 0.0, 0), stop)
        asked = 0.1 + rng.random() * (0.5 if rng.random() < 0.7 else 4.0)
        gateway = rng.choice(self.gateways)
        if twin is not None:
            asked, gateway = twin[1] + rng.random() * 0.1, twin[2]
        self.last = (prompt, asked, gateway)
        gateway.num_open += 1
        self.clients.append((client, asked))

        def connect() -> None:
            gateway.connect(client, lambda: gateway.submit(build(), client))

        def build() -> Request:
            now = self.world.now
            return Request(generation, now + TIMEOUT_S, gateway.local_prefill_max_tokens, PATIENCE_S, now)

        self.world.at(asked, self.nobody, -1, connect)
        if not self.is_calm and rng.random() < 0.2:
            self.world.at(asked + rng.random(), gateway, -1, lambda: gateway.leave(client))

    def _plan_fault(self, rng: random.Random, after: float) -> None:
        """A crash and restart, a pause, or a cut between two processes."""
        length = 0.01 + rng.random() * rng.choice([0.2, 2.0, MAX_PAUSE_S])
        one, other = rng.sample(self.processes, 2)
        match rng.choice(["crash", "pause", "cut", "blackout", "ambush"]):
            case "crash":
                self._plan_crash(one, after, length)
            case "pause":
                self._plan_pause(one, after, length)
            case "cut":
                pair = frozenset((one.name, other.name))
                self.world.at(after, self.nobody, -1, lambda: self._cut(pair))
                self.world.at(after + length, self.nobody, -1, lambda: self._heal(pair))
            case "ambush":  # a message that was sent to one incarnation reaches the next
                decode = self.workers[-1]
                self.world.ambushes[decode.name] = (rng.randint(1, 40), lambda: self._plan_crash(decode, 0.0, 0.05))
            case "blackout":  # a worker restarts while one of its gateways does not look
                self._plan_pause(rng.choice(self.gateways), after, 0.5 + length)
                self._plan_crash(self.workers[-1], after + 0.05, 0.01)

    def _plan_crash(self, process: Process, after: float, length: float) -> None:
        self.world.at(after, self.nobody, -1, lambda: self._crash(process))
        self.world.at(after + length, self.nobody, -1, lambda: self._note("restart", process, process.restart))

    def _plan_pause(self, process: Process, after: float, length: float) -> None:
        self.world.at(after, self.nobody, -1, lambda: self._note("pause", process, process.pause))
        self.world.at(after + length, self.nobody, -1, lambda: self._note("resume", process, process.resume))

    def _note(self, what: str, process: Process, act: Any) -> None:
        self.world.note(what, process.incarnation)
        act()

    def _cut(self, pair: frozenset[str]) -> None:
        self.world.note("cut", *sorted(pair))
        self.world.faults.cut.add(pair)
        for process in self.processes:
            for call in process.incoming:
                if frozenset((call.source.name, call.target.name)) == pair:
                    self.world.at(KEEPALIVE_S, call.source, call.epoch, call.lose_connection)

    def _heal(self, pair: frozenset[str]) -> None:
        self.world.note("heal", *sorted(pair))
        self.world.faults.cut.discard(pair)

    def _crash(self, process: Process) -> None:
        if not process.is_up:
            return
        name, epoch = process.name, process.epoch
        self._note("crash", process, process.crash)
        for peer in self.processes:
            if peer is not process:
                peer.later(self.world.delay(), lambda peer=peer: peer.lose_peer(name, epoch))  # type: ignore[misc]

    def run(self) -> Outcome:
        error = ""
        try:
            self.world.run()
            self._check_end()
        except Exception as violation:  # the tables' own checks and KeyErrors count as well
            error = f"{type(violation).__name__}: {violation}"
        ends = tuple(client.end for client, _ in self.clients)
        return Outcome(self.world.seed, error, ends, self.world.num_events, tuple(self.world.trace))

    def _check_end(self) -> None:
        """All requests have ended in time, and nothing is left anywhere."""
        for client, asked in self.clients:
            if not client.end:
                raise ViolationError(f"{client.name} never ended")
            if client.ended_at > asked + TIMEOUT_S + 3 * MAX_PAUSE_S + SLACK_S:
                raise ViolationError(f"{client.name} ended after {client.ended_at - asked:.1f} s")
            if self.is_calm and client.end != "answer":
                raise ViolationError(f"{client.name} ended as {client.end} although nothing was wrong")
        for worker in self.workers:
            if worker.table.allocator.num_used or len(list(worker.table)):
                raise ViolationError(f"{worker.name} still holds {worker.table.allocator.num_used} pages")
        for gateway in self.gateways:
            if gateway.works or any(link.num_mine for link in gateway.links):
                raise ViolationError(f"{gateway.name} still holds places")


class _Nobody(Process):
    """Does what happens to others."""

    def boot(self) -> None:
        pass


def run_schedule(seed: int) -> Outcome:
    return Schedule(seed).run()
