"""Several models behind one gateway, of which not all are awake: one seed, one schedule, beside those of schedule.py.

The gateway's part is real (`Sleepers`, `ModelGate`, `decide`, a router for each model). `baton serve`, which stops and
starts the workers, is a process here that may be slow, may fail, and whose workers die at any moment.
"""

import random
from functools import partial

from prometheus_client import CollectorRegistry

from gateway.router.admission import Admission
from gateway.router.engine_client import State, TokenizedRequest
from gateway.router.placer import Placer
from gateway.router.router import Router
from gateway.scaling.model_gate import ModelGate
from gateway.scaling.sleep_policy import TURN_S
from gateway.scaling.sleepers import Sleepers
from protos import decode_pb2
from runtime.events import ModelState, SetAwake
from tests.simulator.decode import SimDecode
from tests.simulator.gateway import MAX_QUEUE, PATIENCE_S, SLACK_S, SimGateway
from tests.simulator.model import answer, find_seed
from tests.simulator.schedule import Outcome, check_empty, run_world
from tests.simulator.values import Client
from tests.simulator.worker import Answer
from tests.simulator.world import KEEPALIVE_S, Faults, Process, ViolationError, World
from wire.sampling import SamplingParams

NUM_PAGES, MAX_RUNNING, MOST_ANSWER = 80, 8, 12
LONGEST_S = 8.0  # of a request, where nothing is wrong
CHANGE_S = 3.0  # of a wake or a fall, where nothing is wrong
MAX_WAKE_STARTS = 3
SOCKET_S = 0.001
RESIDENT = ("awake", "falling asleep", "waking")


class ModelWorker(SimDecode):
    """The only worker of a model. It computes prompts itself."""

    pace_s = 0.0  # of its slowest step

    def step_delay(self) -> float:
        return 0.001 + self.world.rng.random() * self.pace_s

    def reserve(self, request: decode_pb2.ReserveRequest, answer: Answer) -> None:
        if request.cache_salt != self.model:
            raise ViolationError(f"a request for {request.cache_salt} came to {self.model}")
        super().reserve(request, answer)


class Supervisor(Process):
    """What `baton serve` does: one change of a model at a time, each reported in order.

    asleep ──SetAwake──► waking ──► awake ──SetAwake──► falling asleep ──► asleep
               ▲            └──► failed                       (a death only makes it sooner)
               └───────────────────┘
    """

    def __init__(self, world: World, workers: dict[str, ModelWorker], max_awake: int, rng: random.Random) -> None:
        self.workers = workers
        self.states: dict[str, State] = {name: "awake" if n < max_awake else "asleep" for n, name in enumerate(workers)}
        self.gateway: ModelsGateway
        self.failing = self.dying = 0.0  # share of wakes that fail, and of starts that die
        self.slowest_s = CHANGE_S
        self._max_awake = max_awake
        self._rng = rng
        self._num_changes = dict.fromkeys(workers, 0)  # what is planned for an earlier one does not happen
        super().__init__(world, "serve")

    def boot(self) -> None:
        for name, state in self.states.items():
            if state == "asleep":
                self.workers[name].crash()

    def check(self) -> None:
        if sum(state in RESIDENT for state in self.states.values()) > self._max_awake:
            raise ViolationError(f"more than {self._max_awake} models have workers: {self.states}")

    def set_awake(self, event: SetAwake) -> None:
        name, before = event.model, self.states[event.model]
        if event.is_awake:
            if before not in ("asleep", "failed"):
                raise ViolationError(f"{name} is to wake, which is {before}")
            self._start(name, 1)
        else:
            if before != "awake":
                raise ViolationError(f"{name} is to sleep, which is {before}")
            self._change(name, "falling asleep")
            self._then(name, self._draw_s(), partial(self._fall, name))

    def kill(self, name: str) -> None:
        """Its worker, if one runs."""
        worker = self.workers[name]
        self.world.note("kill", name, self.states[name])
        if self.states[name] == "falling asleep":
            self._fall(name)
        elif self.states[name] == "waking":
            self._start_again(name, 1)
        elif worker.is_up:
            worker.crash()
            self._then(name, 0.5 + self._rng.random(), worker.restart)

    def _draw_s(self) -> float:
        return self._rng.random() * self.slowest_s

    def _change(self, name: str, state: State) -> None:
        self.world.note("workers", name, state)
        self.states[name] = state
        self._num_changes[name] += 1

    def _then(self, name: str, delay: float, action: "partial[None] | object") -> None:
        """Unless the model's state has changed by then."""
        num_changes = self._num_changes[name]
        self.later(delay, lambda: action() if self._num_changes[name] == num_changes else None)  # type: ignore[operator]

    def _start(self, name: str, num_starts: int) -> None:
        self._change(name, "waking")
        took_s = self._draw_s()
        self._then(name, took_s * self._rng.random(), partial(self._tell, name, "waking", percent=50))
        if self._rng.random() < self.failing:
            self._then(name, took_s, partial(self._fail, name))
        elif self._rng.random() < self.dying:
            self._then(name, took_s, partial(self._start_again, name, num_starts))
        else:
            self._then(name, took_s, partial(self._wake, name))

    def _start_again(self, name: str, num_starts: int) -> None:
        """A worker that died while it was waking."""
        if num_starts == MAX_WAKE_STARTS:
            self._fail(name)
        else:
            self._start(name, num_starts + 1)

    def _fail(self, name: str) -> None:
        self._change(name, "failed")
        self._tell(name, "failed", reason="no memory")

    def _wake(self, name: str) -> None:
        self._change(name, "awake")
        self.workers[name].restart()
        self._tell(name, "awake", decode=(self.workers[name].name,))

    def _fall(self, name: str) -> None:
        self._change(name, "asleep")
        self.workers[name].crash()
        self._tell(name, "asleep")

    def _tell(self, name: str, state: State, **fields: object) -> None:
        event = ModelState(name, state, **fields)  # type: ignore[arg-type]
        self.world.at(SOCKET_S, self.gateway, -1, lambda: self.gateway.learn(event))


class ModelsGateway(SimGateway):
    """A router and a gate for each model."""

    def __init__(self, supervisor: Supervisor, max_awake: int, sleep_after_s: float, timeout_s: float) -> None:
        self._supervisor = supervisor
        self._bounds = max_awake, sleep_after_s
        self._timeout_s = timeout_s
        workers = list(supervisor.workers.values())
        super().__init__(supervisor.world, "G", [], workers, 0, True, False)
        supervisor.gateway = self

    def build_routers(self) -> None:
        clock, world, serve = self.loop.time, self.world, self._supervisor
        self.gates = {name: ModelGate(self.fleet.changes, name, clock) for name in serve.workers}
        self.routers = {
            name: Router(
                self.fleet.add_part(name, 0), Admission(MAX_QUEUE), self._timeout_s, PATIENCE_S, CollectorRegistry(),
                self._has_goal, Placer(expects_prefill=False), clock, model=gate,
            )
            for name, gate in self.gates.items()
        }  # fmt: skip
        for worker in list(serve.workers.values())[self._bounds[0] :]:
            self.fleet.decode.pop(worker.name)

        def send(event: SetAwake) -> None:
            world.at(SOCKET_S, serve, -1, lambda: serve.set_awake(event))

        self.sleepers = Sleepers(self.fleet, list(self.gates.values()), *self._bounds, PATIENCE_S, send, clock)

    def start(self) -> None:
        super().start()
        self.sleepers.look()

    def crash(self) -> None:
        self.fleet.changes._followers.clear()  # a dead gateway decides nothing
        super().crash()

    def find_router(self, wanted: TokenizedRequest) -> Router:
        return self.routers[wanted.cache_salt]

    def learn(self, event: ModelState) -> None:
        self.world.note("learns", event.model, event.state)
        gate = self.gates[event.model]
        waiting = list(gate._wishes) if event.state == "failed" else []
        self.loop.run(lambda: self.sleepers.learn(event))
        if any(wish in gate._wishes for wish in waiting):
            raise ViolationError(f"requests go on waiting for {event.model}, which could not be woken")

    def check(self) -> None:
        states = {name: gate.state for name, gate in self.gates.items()}
        if sum(state in RESIDENT for state in states.values()) > self._bounds[0]:
            raise ViolationError(f"more than {self._bounds[0]} models are awake: {states}")
        changes = self.fleet.changes
        is_quiet = not changes._is_marked and not any(woken.done() for woken in changes._waiting)
        for name, router in self.routers.items():
            if (num_inside := len(router.queue._waiting) + router.queue.num_placed) and states[name] != "awake":
                raise ViolationError(f"{num_inside} requests are let into {name}, which is {states[name]}")
            if is_quiet and self.gates[name].is_open and self.gates[name]._wishes:
                raise ViolationError(f"requests wait for {name}, which is open")

    def check_end(self) -> None:
        """No request is left anywhere, and no model stays closed or between two states."""
        for name, gate in self.gates.items():
            router = self.routers[name]
            if gate.num_inside or gate._wishes or router.admission.num_waiting or router.queue.num_placed:
                raise ViolationError(f"{name} still has requests: {gate.num_inside} inside")
            if gate.is_closed or gate.state not in ("awake", "asleep", "failed"):
                raise ViolationError(f"{name} stays {'closed' if gate.is_closed else gate.state}")
        if self.tasks or self.sleepers._closing:
            raise ViolationError("the gateway still has tasks")


class ModelsSchedule:
    """Everything depends on the seed alone."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._rng = rng = random.Random(f"models {world.seed}")
        self.is_calm = rng.random() < 0.3
        # greedy: one model is asked without a pause, for longer than any other may have to wait
        self.is_greedy = self.is_calm and rng.random() < 0.3
        names = "ab" if self.is_greedy else "abc"[: rng.randint(2, 3)]
        max_awake = 1 if self.is_greedy else rng.randint(1, len(names) - 1)
        self.turns_s = len(names) * (TURN_S + LONGEST_S + 2 * CHANGE_S) + 1.0
        self.timeout_s = self.turns_s + LONGEST_S if self.is_calm else rng.choice([8.0, 25.0, self.turns_s])
        if not self.is_calm:
            world.faults = Faults(rng.choice([0.0, 0.02]), 0.0, rng.choice([0.0, 0.05]))
        workers = {name: self._build_worker(name) for name in names}
        self.supervisor = Supervisor(world, workers, max_awake, rng)
        if not self.is_calm:
            self.supervisor.slowest_s = rng.choice([0.5, CHANGE_S, 12.0])
            self.supervisor.failing, self.supervisor.dying = rng.choice([0.0, 0.3]), rng.choice([0.0, 0.3])
        self.gateway = ModelsGateway(self.supervisor, max_awake, rng.choice([0.0, 0.0, 4.0]), self.timeout_s)
        self.gateways = [self.gateway]
        self.clients: list[tuple[Client, float]] = []
        spread_s = rng.choice([1.0, 10.0, 40.0])
        for _ in range(rng.randint(3, 12)):
            self._ask(rng.choice(names), 0.1 + rng.random() * spread_s, rng.randint(1, MOST_ANSWER))
        if self.is_greedy:
            for number in range(int(1.2 * self.turns_s)):
                self._ask("a", 0.1 + number, MOST_ANSWER)
        elif not self.is_calm:
            for _ in range(rng.randint(0, 5)):
                kill = partial(self.supervisor.kill, rng.choice(names))
                world.at(rng.random() * spread_s * 1.5, self.supervisor, -1, kill)

    def _build_worker(self, name: str) -> ModelWorker:
        worker = ModelWorker(self.world, f"D{name}", NUM_PAGES, MAX_RUNNING, self._rng.randint(0, 1), False, 1, 0)
        worker.model, worker.pace_s = name, 0.4 if self.is_greedy else self._rng.choice([0.02, 0.4])
        return worker

    def _ask(self, model: str, at: float, max_tokens: int) -> None:
        prompt = tuple(self._rng.randrange(100) for _ in range(self._rng.randint(1, 3)))
        name = f"r{len(self.clients)}"
        client = Client(name, answer(prompt, max_tokens, model))
        wanted = TokenizedRequest(
            name, prompt, max_tokens, SamplingParams(0.0, seed=find_seed(model)), frozenset(), cache_salt=model
        )
        self.gateway.num_open += 1
        self.clients.append((client, at))
        self.world.at(at, self.supervisor, -1, lambda: self.gateway.connect(client, wanted))
        may_leave = model != "a" if self.is_greedy else not self.is_calm
        if may_leave and self._rng.random() < (0.7 if self.is_greedy else 0.3):
            first, spread = (TURN_S, 3.0) if self.is_greedy else (0.0, self._rng.choice([1.0, 10.0]))
            leaves = at + first + self._rng.random() * spread  # greedy: while the other is closed, but not idle yet
            self.world.at(leaves, self.gateway, -1, lambda: self.gateway.leave(client))

    def check_end(self) -> None:
        for client, asked in self.clients:
            took_s = client.ended_at - asked
            if not client.end or took_s > self.timeout_s + KEEPALIVE_S + SLACK_S:  # a lost Abort goes before a Reserve
                raise ViolationError(f"{client.name} ended as {client.end!r} after {took_s:.1f} s")
            if "not awake in time" in client.end and took_s < self.timeout_s - SLACK_S:
                raise ViolationError(f"{client.name} was given up after {took_s:.1f} s")
            if self.is_calm and client.end not in ("answer", "left"):
                raise ViolationError(f"{client.name} ended as {client.end} although nothing was wrong")
        self.gateway.check_end()
        for worker in self.supervisor.workers.values():
            if worker.is_up:
                check_empty(worker)


def run_models(seed: int) -> Outcome:
    return run_world(seed, ModelsSchedule)
