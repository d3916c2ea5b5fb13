"""One seed, one schedule: a small fleet, a few requests, a few faults, and the final checks."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

from gateway.router import coming, placement
from gateway.router.engine_client import Speculation, TokenizedRequest
from tests.simulator.clock import virtual
from tests.simulator.decode import SimDecode
from tests.simulator.files import Files
from tests.simulator.gateway import SLACK_S, TIMEOUT_S, SimGateway
from tests.simulator.model import PAGE_TOKENS, WEIGHTS, answer, find_seed, follow, with_weights
from tests.simulator.prefill import SimPrefill
from tests.simulator.values import Client
from tests.simulator.world import KEEPALIVE_S, Faults, Process, ViolationError, World
from wire.retention import KeptPart
from wire.sampling import SamplingParams

FAULTS_END_S = 2.0
LOANS, LOANS_OF_ALL = 0.3, 0.18  # share of schedules with them, and of those where decode workers take part
MAX_PAUSE_S = 8.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one schedule."""

    seed: int
    error: str  # the violation; empty if there is none
    ends: tuple[str, ...]  # of the requests
    num_events: int
    trace: tuple[tuple[float, str, tuple[Any, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A client's request: what, where and when."""

    prompt: tuple[int, ...]
    salt: str
    answer: tuple[int, ...]
    at: float
    gateway: SimGateway


class Planned(Protocol):
    """A schedule before it runs."""

    @property
    def clients(self) -> Sequence[tuple[Any, float]]:
        """Each with its start time."""

    @property
    def gateways(self) -> Sequence[Any]:
        """All of them."""

    def check_end(self) -> None:
        """Raise if an invariant is violated when nothing happens any more."""


class Outside(Process):
    """Acts on other processes."""

    def boot(self) -> None:
        pass


class Troubles:
    """Kills, freezes and other troubles of processes, at times that are drawn before the run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.outside = Outside(world, "world")
        self.processes: list[Process] = []

    def _plan_cut(self, one: Process, other: Process, after: float, length: float) -> None:
        pair = frozenset((one.name, other.name))
        self.world.at(after, self.outside, -1, lambda: self._cut(pair))
        self.world.at(after + length, self.outside, -1, lambda: self._heal(pair))

    def _plan_crash(self, process: Process, after: float, length: float) -> None:
        self.world.at(after, self.outside, -1, lambda: self._crash(process))
        self.world.at(after + length, self.outside, -1, lambda: self._note("restart", process, process.restart))

    def _plan_pause(self, process: Process, after: float, length: float) -> None:
        self.world.at(after, self.outside, -1, lambda: self._note("pause", process, process.pause))
        self.world.at(after + length, self.outside, -1, lambda: self._note("resume", process, process.resume))

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


class Schedule(Troubles):
    """Everything depends on the seed alone."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        seed, rng = world.seed, world.rng
        self.is_calm = rng.random() < 0.1
        if not self.is_calm:
            kinds = rng.choice([(0.0, 0.0, 0.0), (0.03, 0.03, 0.03), (0.0, 0.05, 0.0), (0.0, 0.0, 0.08)])
            self.world.faults = Faults(*kinds, rng.choice([0.0, 0.3]), rng.choice([0.0, 0.3]))
        # drawn separately, so that schedules without states stay as they are
        states_rng = random.Random(f"states {seed}")
        self.has_states = states_rng.random() < 0.33
        self._goals_rng = goals_rng = random.Random(f"goals {seed}")
        self.has_goals = goals_rng.random() < 0.3
        # crowded: reads are slow, clients leave without decode learning of it, other requests need prefill's few pages,
        # or its few slots
        self.is_crowded = not self.is_calm and rng.random() < (0.3 if self.has_states else 0.15)
        # uniform: prompts of one length that share nothing, so that offers are easily confused
        self.is_uniform = rng.random() < (0.15 if self.is_crowded else 0.35)
        if self.is_crowded:
            self.world.faults = Faults(0.0, 0.0, 0.0, 0.5, 0.0)
        faults = self.world.faults
        faults.failing = faults.loss / 4
        if self.has_states and not self.is_calm:
            faults.failing += 0.08
            faults.slow_decode_steps = states_rng.choice([0.0, 0.3])
        num_pages, max_running = rng.randint(6, 7 if self.is_crowded else 11), rng.randint(2, 4)
        has_draft = rng.random() < 0.5
        # like states_rng
        self._ranks_rng = ranks_rng = random.Random(~seed)
        has_ranks = ranks_rng.random() < 0.3

        def draw_ranks() -> int:
            return ranks_rng.choice([1, 2, 2]) if has_ranks else 1

        def draw_slots() -> int:
            """A few, or enough."""
            return states_rng.choice([states_rng.randint(4, 6), 4 * max_running]) if self.has_states else 0

        decodes = [
            SimDecode(
                self.world, f"D{n}", num_pages, max_running, rng.randint(0, 1), has_draft, draw_ranks(), draw_slots()
            )
            for n in range(rng.randint(1, 2))
        ]
        for decode in decodes:
            decode.most_new_answers = goals_rng.randint(1, 3) if self.has_goals else 0
        by_name = {decode.name: decode for decode in decodes}
        num_prefill_pages, max_offer_pages = num_pages - rng.randint(1, 3), rng.choice([1, 2, 9])
        if self.is_uniform:
            max_offer_pages = 9
        if self.is_crowded:
            num_prefill_pages, max_offer_pages = 12 if self.has_states else rng.randint(4, 5), 9
        prefills = [
            SimPrefill(
                self.world, f"P{n}", num_prefill_pages, max_running, rng.randint(0, 1), has_draft, draw_ranks(),
                3 if self.has_states and self.is_crowded else draw_slots(), max_offer_pages, by_name,
            )
            for n in range(1 if self.is_crowded else rng.randint(1, 2))
        ]  # fmt: skip
        local_prefill_max_tokens, uses_cache = rng.choice([0, 0, 2]), rng.random() < 0.9
        self.gateways = [
            SimGateway(self.world, f"G{n}", prefills, decodes, local_prefill_max_tokens, uses_cache, self.has_goals)
            for n in range(2 if self.is_crowded else rng.choice([1, 1, 2]))
        ]
        self.workers: list[SimPrefill | SimDecode] = [*prefills, *decodes]
        self.processes = [*self.gateways, *self.workers]
        files_rng = random.Random(f"files {seed}")  # like states_rng
        if files_rng.random() < 0.3:
            shared = Files(files_rng)
            for worker in self.workers:
                worker.files = shared if files_rng.random() < 0.5 else Files(files_rng)
                worker.files.begin_on(worker)
        peers_rng = random.Random(f"lenders {seed}")  # like states_rng
        kind = peers_rng.random()
        if kind < LOANS:
            is_forced = kind > LOANS_OF_ALL
            lending: Sequence[SimPrefill | SimDecode] = prefills if is_forced else self.workers
            for worker in lending:
                worker.loans.lenders = [other for other in lending if other is not worker]
                worker.loans.is_forced = is_forced
            if not is_forced:
                placement.LEAST_LENT = PAGE_TOKENS
                for decode in decodes:
                    decode.max_offer_pages = peers_rng.choice([1, 2, 9])
            if not self.is_calm:
                faults.slow_reads = peers_rng.choice([faults.slow_reads, 0.5])
        kept_rng = random.Random(f"kept {seed}")  # like states_rng
        self._kept_rng = kept_rng if kept_rng.random() < 0.2 else None
        rollout_rng = random.Random(f"rollout {seed}")  # like states_rng
        self.has_revisions = len(decodes) > 1 and rollout_rng.random() < 0.3
        if self.has_revisions:
            self._plan_rollout(decodes, prefills, rollout_rng)
        self.clients: list[tuple[Client, float]] = []  # with its start time
        self._asked: list[_Asked] = []
        self._most_prompt, self._most_tokens = 2 * num_prefill_pages + 1, 2 * num_pages
        text, start = [rng.randrange(100) for _ in range(9)], [rng.randrange(100) for _ in range(2)]
        self._texts = [tuple(text), (*start, *text[2:])]  # equal pages after different beginnings
        self._salts = rng.choice([("",), ("", "salt")])
        self._mean_prompt, self._most_answer, self._spread = (
            7 if self.is_crowded else rng.choice([3, 7]), rng.choice([4, 9]), rng.choice([0.05, 0.5])
        )  # fmt: skip
        num_requests = rng.randint(4, 7) if self.is_crowded else rng.randint(2, 5)
        if self.has_states and self.is_crowded:
            num_requests, self._spread = num_requests + 2, 3.0
        for number in range(num_requests):
            self._plan_request(number, rng)
        if not self.is_calm:
            if self.is_uniform:
                self._plan_ambush(rng)
            center = rng.random() * FAULTS_END_S  # the hard faults are those that come together
            for _ in range(rng.randint(1, 4)):
                self._plan_fault(rng, center + rng.random() * rng.choice([0.3, FAULTS_END_S]))
            for worker in self.workers:
                if worker.num_ranks > 1 and ranks_rng.random() < 0.5:
                    self._plan_rank_death(worker, ranks_rng)

    def _plan_rollout(
        self, decodes: Sequence[SimDecode], prefills: Sequence[SimPrefill], rng: random.Random
    ) -> None:  # fmt: skip
        """A decode worker of another revision, mostly with other weights, which gets more and more of what is new."""
        weights = rng.choice(["other weights", "other weights", WEIGHTS])
        for worker in (decodes[1], *(one for one in prefills[1:] or prefills if rng.random() < 0.7)):
            worker.revision, worker.weights = "new", weights
            worker.boot()
        for gateway in self.gateways:
            for share in (0.0, 0.5, 1.0):
                self.world.at(rng.random() * FAULTS_END_S, gateway, -1, partial(self._share_out, gateway, share))

    def _share_out(self, gateway: SimGateway, share: float) -> None:
        self.world.note("share", gateway.name, share)
        gateway.rollout.shares = {"new": share}

    def _plan_request(self, number: int, rng: random.Random) -> None:
        asked = self._plan_asked(rng)
        self._asked.append(asked)
        expected = asked.answer
        stop = frozenset[int]()
        if rng.random() < 0.2:
            expected = expected[: rng.randint(1, len(expected))]
            stop = frozenset(expected[-1:])
        name = f"r{number}"
        other: list[int] = []
        if self.has_revisions:
            other = follow(asked.prompt, len(asked.answer), with_weights(find_seed(asked.salt), "other weights"))
        client = Client(name, expected, other)
        wanted = TokenizedRequest(
            name, asked.prompt, len(asked.answer), SamplingParams(0.0, seed=find_seed(asked.salt)), stop,
            speculation=Speculation(rng.choice(["auto", "off"])), cache_salt=asked.salt,
        )  # fmt: skip
        if self.has_goals:
            wanted = self._add_goals(wanted)
        if self._kept_rng is not None:
            part = KeptPart(self._kept_rng.randint(1, 2 * len(asked.prompt)), self._kept_rng.choice([0.3, 5.0]))
            wanted = replace(wanted, kept=(part,))
        gateway = asked.gateway
        gateway.num_open += 1
        self.clients.append((client, asked.at))

        self.world.at(asked.at, self.outside, -1, lambda: gateway.connect(client, wanted))
        if not self.is_calm and rng.random() < (0.6 if self.is_crowded else 0.2):
            leaves = asked.at + rng.random()
            self.world.at(leaves, gateway, -1, lambda: gateway.leave(client))
            if self.is_crowded and rng.random() < 0.7:
                self._plan_cut(gateway, self.workers[-1], leaves - 0.01, 6.0 if self.has_states else 3.0)

    def _add_goals(self, wanted: TokenizedRequest) -> TokenizedRequest:
        rng = self._goals_rng
        deadline_s = rng.choice([None, None, 0.1, 0.5, 3.0])
        return replace(wanted, priority=rng.choice([0, 5, 9]), owner=rng.choice("ab"), deadline_s=deadline_s)

    def _plan_asked(self, rng: random.Random) -> "_Asked":
        """A new prompt, or one that shares a beginning: the same at once, the next turn, or a branch."""
        before = rng.choice(self._asked) if self._asked else None
        kind = 1.0 if self.is_uniform else rng.random()
        salt, gateway = rng.choice(self._salts), rng.choice(self.gateways)
        at = 0.1 + rng.random() * (self._spread if rng.random() < 0.7 else 4.0)
        length = max(1, self._mean_prompt + rng.randint(-2, 2))
        prompt = rng.choice(self._texts)[:length]
        if self.is_uniform:
            prompt = tuple(rng.randrange(100) for _ in range(self._mean_prompt + 1))
        if before is not None and kind < 0.3:
            prompt, at = before.prompt, before.at + rng.random() * 0.1
            if rng.random() < 0.7:
                salt, gateway = before.salt, before.gateway
        elif before is not None and kind < 0.6:
            prompt, at = (*before.prompt, *before.answer, rng.randrange(100)), before.at + rng.random() * 2.0
            salt = before.salt if rng.random() < 0.8 else salt
        elif kind < 0.75:
            prompt = (*prompt[:-1], rng.randrange(100))
        if len(prompt) > self._most_prompt or len(prompt) >= self._most_tokens:
            prompt = prompt[: min(length + 1, self._most_prompt)]
        max_tokens = rng.randint(1, min(self._most_answer, self._most_tokens - len(prompt)))
        return _Asked(prompt, salt, tuple(answer(prompt, max_tokens, salt)), at, gateway)

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
                self._plan_cut(one, other, after, length)
            case "ambush":
                self._plan_ambush(rng)
            case "blackout":  # a worker restarts while one of its gateways cannot see it
                self._plan_pause(rng.choice(self.gateways), after, 0.5 + length)
                self._plan_crash(self.workers[-1], after + 0.05, 0.01)

    def _plan_ambush(self, rng: random.Random) -> None:
        """A message sent to one incarnation reaches the next."""
        decode = self.workers[-1]
        self.world.ambushes[decode.name] = (rng.randint(1, 40), lambda: self._plan_crash(decode, 0.0, 0.05))

    def _plan_rank_death(self, worker: SimPrefill | SimDecode, rng: random.Random) -> None:
        """A rank dies, perhaps between two reads of an offer; its worker dies when it notices."""
        after, rank = 0.1 + rng.random() * FAULTS_END_S, rng.randrange(1, worker.num_ranks)
        self.world.at(after, self.outside, -1, lambda: self._kill_rank(worker, rank))
        self._plan_crash(worker, after + rng.random(), 0.05)

    def _kill_rank(self, worker: SimPrefill | SimDecode, rank: int) -> None:
        self.world.note("rank dies", worker.incarnation, rank)
        worker.memory.dead.add(rank)

    def check_end(self) -> None:
        """All requests ended in time, and nothing is left anywhere."""
        for client, asked in self.clients:
            if not client.end:
                raise ViolationError(f"{client.name} never ended")
            if client.ended_at > asked + TIMEOUT_S + 3 * MAX_PAUSE_S + SLACK_S:
                raise ViolationError(f"{client.name} ended after {client.ended_at - asked:.1f} s")
            if client.end.startswith("violation"):
                raise ViolationError(f"{client.name}: {client.end}")
            is_refused = self.has_goals and client.end.startswith("error 429")
            if self.is_calm and client.end != "answer" and not is_refused:
                raise ViolationError(f"{client.name} ended as {client.end} although nothing was wrong")
        for worker in self.workers:
            check_empty(worker)
        for gateway in self.gateways:
            gateway.check_end()


def run_world(seed: int, build: Callable[[World], Planned]) -> Outcome:
    """Until nothing happens any more; then `check_end`."""
    error, world = "", World(seed)
    with virtual(world), patch.object(placement, "LEAST_LENT", placement.LEAST_LENT):  # some schedules change it
        schedule = build(world)
        try:
            world.run()
            schedule.check_end()
        except Exception as violation:  # including the tables' own checks and KeyErrors
            error = f"{type(violation).__name__}: {violation}"
        ends = tuple(client.end for client, _ in schedule.clients)
        for gateway in schedule.gateways:
            gateway.crash()
    return Outcome(seed, error, ends, world.num_events, tuple(world.trace))


def check_empty(worker: SimPrefill | SimDecode) -> None:
    """No request is left in it."""
    if worker.scheduler.kv.cache.num_held or len(worker.scheduler):
        raise ViolationError(f"{worker.name} still holds {worker.scheduler.kv.cache.num_held} pages")
    if worker.scheduler.kv.restores:
        raise ViolationError(f"{worker.name} still restores")
    if num_slots := worker.scheduler.kv.states.cache.num_held:
        raise ViolationError(f"{worker.name} still holds {num_slots} slots")
    if len(worker.scheduler._free_rows) != len(worker.rows.tokens):
        raise ViolationError(f"{worker.name} still has a row")


def run_schedule(seed: int) -> Outcome:
    """Prompts are short here, so a short part that two share is long enough to wait for."""
    with patch.object(coming, "MARK_TOKENS", PAGE_TOKENS), patch.object(coming, "LEAST_SHARED", 2 * PAGE_TOKENS):
        return run_world(seed, Schedule)
