"""A discrete-event simulation of a fleet behind one gateway, in one process and seeded.

Real: the gateway's router, with its queue, prefix index and clients of workers; the workers' schedulers, prefix caches
and step plans; transfers as those see them. Modelled: a step's time (costs.py), a message (a constant), the bytes of
a transfer (one link per decode worker), tokens (no answer stops early). Left out: failures, so no lease ends; text;
speculation; steps launched before the last one is collected; the gateway's own CPU time, which is reported.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from bench.simulate.channels import BothChannel, DecodeChannel, PrefillChannel, Wires
from bench.simulate.costs import Costs
from bench.simulate.events import Clock
from bench.simulate.figures import Answer, Outcome
from bench.simulate.virtual_time import VirtualLoop
from bench.simulate.worker import Limits, SimWorker
from bench.simulate.workload import Conversation
from gateway.errors import ApiError
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
        self._keeps_roles = fleet.changes_roles
        names = {
            role: [f"{role}-{number}" for number in range(count)]
            for role, count in (("prefill", fleet.prefill.count), ("decode", fleet.decode.count))
        }
        if fleet.changes_roles:
            names = dict.fromkeys(names, names["prefill"] + names["decode"])
        decodes = {
            name: DecodeChannel(name, self._build(fleet.decode, is_bulk), fleet.wires) for name in names["decode"]
        }
        answering = {name: channel.worker for name, channel in decodes.items()}
        computing = {name: answering.get(name) or self._build(fleet.prefill, is_bulk) for name in names["prefill"]}
        prefills = {
            name: PrefillChannel(name, worker, fleet.wires, decodes, computing | answering)
            for name, worker in computing.items()
        }
        channels: dict[str, Any] = {**prefills, **decodes}
        self.workers = {"prefill": list(computing.values()), "decode": list(answering.values())}
        if fleet.changes_roles:
            channels = {name: BothChannel(decodes[name], prefills[name]) for name in decodes}
            self.workers = {"both": self.workers["decode"]}
        self._fleet = gateway_fleet.Fleet(
            list(prefills), list(decodes), FOR_EVER, FOR_EVER, 0, lambda address, _name="": channels[address],
            self._loop.time,
        )  # fmt: skip
        self._placer = TimedPlacer(fleet.local_prefill_max_tokens, fleet.uses_cache)
        self._router = Router(
            self._fleet,
            Admission(ANY_NUMBER),
            FOR_EVER,
            FOR_EVER,
            CollectorRegistry(),
            False,
            self._placer,
            self._loop.time,
        )

    def _all_workers(self) -> list[SimWorker]:
        return [worker for some in self.workers.values() for worker in some]

    def _build(self, role: Workers, is_bulk: bool) -> SimWorker:
        return SimWorker(self._clock, role.costs, role.limits, self.outcome.gaps, is_bulk)

    def run(self) -> Outcome:
        began, outcome = time.perf_counter(), self.outcome
        with capture_logs():
            self._loop.run(self._fleet.start)
            if self._keeps_roles:
                self._loop.run(self._keep_roles)
            for conversation in self._conversations:
                self._clock.at(conversation.start, partial(self._start, conversation))
            num_requests = sum(len(one.num_new) for one in self._conversations)
            self._clock.run(lambda: len(outcome.answers) == num_requests)
            self._loop.kill()
        outcome.busy_s = {role: [worker.busy_s for worker in all_] for role, all_ in self.workers.items() if all_}
        outcome.num_preemptions = sum(worker.scheduler.num_preemptions for worker in self._all_workers())
        outcome.num_choices, outcome.choosing_s = self._placer.num_choices, self._placer.choosing_s
        outcome.ran_s = time.perf_counter() - began
        return outcome

    def check(self) -> None:
        """Check that every page is accounted for, and none is held."""
        for worker in self._all_workers():
            worker.scheduler.check()
            if len(worker.scheduler) or worker.scheduler.kv.cache.num_held:
                raise AssertionError(
                    f"{len(worker.scheduler)} sequences and {worker.scheduler.kv.cache.num_held} pages are left"
                )

    def _keep_roles(self) -> None:
        keeper = RoleKeeper(self._fleet, self._router.queue, "gateway", clock=self._loop.time)
        self._loop.create_task(keeper.run()).add_done_callback(lambda task: task.cancelled() or task.result())

    def _start(self, client: Conversation) -> None:
        # its end is an action of the loop: `result` there raises, so that what nobody foresaw ends the simulation
        self._loop.create_task(self._converse(client)).add_done_callback(lambda task: task.cancelled() or task.result())

    async def _converse(self, client: Conversation) -> None:
        """One turn after the other."""
        before = b""
        for turn in range(len(client.num_new)):
            if turn:
                await asyncio.sleep(client.think_s[turn - 1])
            prompt = client.prompt(turn, before)
            num_tokens = await self._ask(client, turn, prompt)
            before = prompt + bytes(num_tokens)

    async def _ask(self, client: Conversation, turn: int, prompt: bytes) -> int:
        """Returns the number of tokens of the answer."""
        name, clock = f"{client.number}/{turn}", self._clock
        session = str(client.number) if len(client.num_new) > 1 else ""
        wanted = TokenizedRequest(
            name, tuple(prompt), client.num_answer[turn], GREEDY, frozenset(), session=session
        )  # fmt: skip
        arrived, first_at, num_tokens, num_cached, error = clock.now, 0.0, 0, 0, ""
        try:
            with self._router.admit(1) as admitted:
                async for tokens in self._router.generate(wanted, admitted):
                    first_at = first_at or clock.now
                    num_tokens += len(tokens.token_ids)
                    num_cached = tokens.timing.cached_tokens if tokens.timing else num_cached
        except ApiError as failure:
            error, num_cached = str(failure), 0
        self.outcome.answers.append(
            Answer(
                (client.number, turn), arrived, first_at, clock.now, len(prompt), num_tokens, num_cached, error
            )
        )  # fmt: skip
        return num_tokens
