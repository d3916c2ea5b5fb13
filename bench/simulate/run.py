"""A discrete-event simulation of a fleet behind one gateway, in one process and seeded.

Real: the gateway's router, with its queue, prefix index and clients of workers; the workers' schedulers, prefix caches
and step plans; transfers as those see them. Modelled: a step's time (costs.py), a message (a constant), the bytes of
a transfer (one link per decode worker), tokens (no answer stops early, and each says its worker's revision); deaths,
drains and restarts of workers. An answer whose worker dies goes on from its first token: the gateway gets the others
at the end only. Left out: silence, so no lease ends; text; speculation; steps launched before the last one is
collected; the gateway's own CPU time, which is reported.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from bench.simulate.channels import BothChannel, DecodeChannel, PrefillChannel, Wires
from bench.simulate.costs import Costs
from bench.simulate.events import Clock
from bench.simulate.figures import Answer, Outcome
from bench.simulate.hosts import Host, LiveChannel, Operator, Troubles, spawn
from bench.simulate.virtual_time import VirtualLoop
from bench.simulate.worker import Limits, SimWorker
from bench.simulate.workload import Conversation
from gateway.errors import ApiError
from gateway.policies.forecast import Forecast
from gateway.policies.homes import Homes
from gateway.policies.local_prefill import choose_local_prefill
from gateway.policies.rollout import Rollout
from gateway.policies.session_gaps import SessionGaps
from gateway.router import fleet as gateway_fleet
from gateway.router.admission import Admission
from gateway.router.engine_client import TokenizedRequest
from gateway.router.placement import Placement, Wait
from gateway.router.placer import Held, Placer
from gateway.router.readiness import Unready
from gateway.router.request import Request
from gateway.router.router import Router
from gateway.router.worker_view import WorkerView
from gateway.scaling.role_keeper import RoleKeeper
from wire.sampling import SamplingParams
from worker.params import ANY_NUMBER

FOR_EVER = float("inf")
HEARTBEAT_S = 5.0
SETTLE_S = 10.0
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Workers:
    """All workers of a role."""

    count: int
    num_gpus: int  # of each
    costs: Costs
    limits: Limits


@dataclass(frozen=True, slots=True)
class Fleet:
    prefill: Workers
    decode: Workers
    wires: Wires
    local_prefill_max_tokens: int = 0
    uses_cache: bool = True
    changes_roles: bool = False  # all workers have both, and limits of decode workers
    troubles: Troubles = field(default_factory=Troubles)


def colocate(fleet: Fleet) -> Fleet:
    """The same GPUs, as decode workers that compute prompts between the steps of answers."""
    num_gpus = sum(role.count * role.num_gpus for role in (fleet.prefill, fleet.decode))
    decode = replace(fleet.decode, count=num_gpus // fleet.decode.num_gpus)
    return replace(fleet, prefill=replace(fleet.prefill, count=0), decode=decode, changes_roles=False)


class TimedPlacer(Placer):
    """The real one; measures its CPU time."""

    num_choices = 0
    choosing_s = 0.0

    def choose(
        self, workers: Sequence[WorkerView], request: Request, decodes: frozenset[str] | None = None
    ) -> Placement | Wait | Held | Unready:
        began = time.thread_time()
        choice = super().choose(workers, request, decodes)
        self.choosing_s += time.thread_time() - began
        self.num_choices += 1
        return choice


class Simulation:
    """One run. Call `check` after its end."""

    def __init__(self, fleet: Fleet, conversations: Sequence[Conversation], is_bulk: bool = True) -> None:
        self.outcome = Outcome()
        self._clock = clock = Clock()
        self._loop = VirtualLoop(lambda: clock.now, clock.after)
        self._conversations = conversations
        self._settings = fleet
        self._is_bulk = is_bulk
        self._decodes: dict[str, DecodeChannel] = {}  # address |-> the latest worker's
        self._workers: dict[str, SimWorker] = {}
        self._prefills = [f"prefill-{number}" for number in range(fleet.prefill.count)]
        decodes = [f"decode-{number}" for number in range(fleet.decode.count)]
        mixed = [name for pair in zip_longest(self._prefills, decodes) for name in pair if name is not None]
        self.hosts = {name: Host(name, partial(self._build, name)) for name in mixed}
        prefills, decodes = (mixed, mixed) if fleet.changes_roles else (self._prefills, decodes)
        channels: dict[str, Any] = {**self.hosts}
        self._fleet = gateway_fleet.Fleet(
            prefills, decodes, HEARTBEAT_S, FOR_EVER, 0, lambda address, _name="": channels[address], self._loop.time
        )
        rollout = Rollout()
        self._placer = TimedPlacer(
            choose_local_prefill(fleet.local_prefill_max_tokens), fleet.uses_cache, revisions=rollout, homes=Homes()
        )
        self._operator = Operator([*self.hosts.values()], fleet.troubles, rollout)
        self._router = Router(
            self._fleet,
            Admission(ANY_NUMBER),
            FOR_EVER,
            FOR_EVER,
            CollectorRegistry(),
            False,
            self._placer,
            self._loop.time,
            keep_times=SessionGaps(),
            expectations=Forecast(),
        )

    def _build(self, address: str, incarnation: str, revision: int) -> LiveChannel:
        fleet, outcome = self._settings, self.outcome
        is_prefill = address in self._prefills and not fleet.changes_roles
        role = fleet.prefill if is_prefill else fleet.decode
        worker = SimWorker(self._clock, role.costs, role.limits, outcome.gaps, self._is_bulk, revision)
        self._workers[address] = worker
        decode = None if is_prefill else DecodeChannel(address, incarnation, worker, fleet.wires, self._workers)
        if decode is not None:
            self._decodes[address] = decode
            if not fleet.changes_roles:
                return decode
        prefill = PrefillChannel(incarnation, worker, fleet.wires, self._workers, self._decodes, outcome.note_mispaired)
        return prefill if decode is None else BothChannel(decode, prefill)

    def run(self) -> Outcome:
        began, outcome = time.perf_counter(), self.outcome
        with capture_logs():
            self._loop.run(self._fleet.start)
            if self._settings.changes_roles:
                self._loop.run(self._keep_roles)
            self._loop.run(lambda: spawn(self._operator.works, self._loop.create_task))
            for conversation in self._conversations:
                self._clock.at(conversation.start, partial(self._start, conversation))
            num_requests = sum(len(one.num_new) for one in self._conversations)
            self._clock.run(lambda: len(outcome.answers) == num_requests)
            if self._operator.works:  # what is left of other attempts ends
                ends_at = self._clock.now + SETTLE_S
                self._clock.run(lambda: self._clock.now >= ends_at)
            self._loop.kill()
        for name, host in self.hosts.items():
            role = "both" if self._settings.changes_roles else name.partition("-")[0]
            outcome.busy_s.setdefault(role, []).append(host.find_busy_s())
        outcome.num_preemptions = sum(worker.scheduler.num_preemptions for worker in self._workers.values())
        outcome.num_deaths = self._operator.num_deaths
        outcome.upgraded = sum(worker.revision for worker in self._workers.values()) / len(self._workers)
        outcome.num_choices, outcome.choosing_s = self._placer.num_choices, self._placer.choosing_s
        outcome.ran_s = time.perf_counter() - began
        return outcome

    def check(self) -> None:
        """Check that every page is accounted for, and none is held."""
        for worker in self._workers.values():
            if worker.is_dead:
                continue
            worker.scheduler.check()
            if len(worker.scheduler) or worker.scheduler.kv.cache.num_held:
                raise AssertionError(
                    f"{len(worker.scheduler)} sequences and {worker.scheduler.kv.cache.num_held} pages are left"
                )

    def _keep_roles(self) -> None:
        keeper = RoleKeeper(self._fleet, self._router.queue, "gateway", clock=self._loop.time)
        self._loop.create_task(keeper.run()).add_done_callback(lambda task: task.cancelled() or task.result())

    def _start(self, client: Conversation) -> None:
        # its end is an action of the loop: `result` there raises, so that an unforeseen error ends the simulation
        self._loop.create_task(self._converse(client)).add_done_callback(lambda task: task.cancelled() or task.result())

    async def _converse(self, client: Conversation) -> None:
        """One turn after the other."""
        before = b""
        for turn in range(len(client.num_new)):
            if turn:
                await asyncio.sleep(client.think_s[turn - 1])
            prompt = client.prompt(turn, before)
            answer = await self._ask(client, turn, prompt)
            before = prompt + answer

    async def _ask(self, client: Conversation, turn: int, prompt: bytes) -> bytes:
        """Returns the answer's tokens."""
        name, clock = f"{client.number}/{turn}", self._clock
        session = str(client.number) if len(client.num_new) > 1 else ""
        wanted = TokenizedRequest(
            name, tuple(prompt), client.num_answer[turn], GREEDY, frozenset(), session=session
        )  # fmt: skip
        arrived, first_at, answer, num_cached, error = clock.now, 0.0, bytearray(), 0, ""
        try:
            with self._router.admit(1) as admitted:
                async for tokens in self._router.generate(wanted, admitted):
                    first_at = first_at or clock.now
                    answer += bytes(tokens.token_ids)
                    num_cached = tokens.timing.cached_tokens if tokens.timing else num_cached
        except ApiError as failure:
            error, num_cached = str(failure), 0
        self.outcome.answers.append(
            Answer(
                (client.number, turn), arrived, first_at, clock.now, len(prompt), len(answer), num_cached, error,
                is_mixed=len(set(answer)) > 1,
            )
        )  # fmt: skip
        return bytes(answer)
