"""A discrete-event simulation of a fleet behind one gateway, in one process and seeded.

Real: the gateway's queue, router, prefix memory and request machine; the workers' tables, prefix caches, admission and
step plans; transfers as those tables see them. Modelled: a step's time (costs.py), a message (a constant), the bytes of
a transfer (one link per decode worker), tokens (no answer stops early). Left out: failures, so no lease ends; text;
speculation; steps launched before the last one is collected; the gateway's own CPU time, which is reported.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from bench.simulate.costs import Costs
from bench.simulate.events import Clock
from bench.simulate.figures import Answer, Outcome
from bench.simulate.gateway import Life, SimGateway, Wires, cached_tokens
from bench.simulate.settings import Workload
from bench.simulate.worker import Limits, SimWorker
from bench.simulate.workload import Conversation, build_conversations
from gateway.ring.generation import Generation
from gateway.ring.reasons import as_error
from wire.sampling import SamplingParams

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


def colocate(fleet: Fleet) -> Fleet:
    """The same GPUs, as decode workers that compute prompts between the steps of answers."""
    num_gpus = sum(role.count * role.num_gpus for role in (fleet.prefill, fleet.decode))
    decode = replace(fleet.decode, count=num_gpus // fleet.decode.num_gpus)
    return replace(fleet, prefill=replace(fleet.prefill, count=0), decode=decode)


class Simulation:
    """One run. Call `check` after its end."""

    def __init__(self, fleet: Fleet, workload: Workload, is_bulk: bool = True) -> None:
        self.outcome = Outcome()
        self._clock = Clock()
        self._workload = workload
        self._gateway = SimGateway(self._clock, fleet.wires, fleet.local_prefill_max_tokens, fleet.uses_cache)
        publish = {"prefill": self._gateway.take_prefill_updates, "decode": self._gateway.take_updates}
        self.workers = {
            name: [self._build(role, publish[name], is_bulk) for _ in range(role.count)]
            for name, role in {"prefill": fleet.prefill, "decode": fleet.decode}.items()
        }
        self._gateway.connect(self.workers["prefill"], self.workers["decode"])

    def _build(self, role: Workers, publish: Callable[..., None], is_bulk: bool) -> SimWorker:
        return SimWorker(self._clock, role.costs, role.limits, self.outcome.gaps, publish, is_bulk)

    def run(self) -> Outcome:
        began, outcome = time.perf_counter(), self.outcome
        for conversation in build_conversations(self._workload):
            self._clock.at(conversation.start, partial(self._ask, conversation, 0, b""))
        self._gateway.poll()
        self._clock.run(lambda: len(outcome.answers) == self._workload.num_requests)
        outcome.busy_s = {role: [worker.busy_s for worker in all_] for role, all_ in self.workers.items() if all_}
        outcome.num_preemptions = sum(worker.scheduler.num_preemptions for worker in self.workers["decode"])
        outcome.num_choices, outcome.choosing_s = self._gateway.router.num_choices, self._gateway.router.choosing_s
        outcome.ran_s = time.perf_counter() - began
        return outcome

    def check(self) -> None:
        """Check that every page is accounted for, and none is held."""
        for worker in (*self.workers["prefill"], *self.workers["decode"]):
            worker.scheduler.check()
            if len(worker.scheduler) or worker.scheduler.cache.num_held:
                raise AssertionError(
                    f"{len(worker.scheduler)} sequences and {worker.scheduler.cache.num_held} pages are left"
                )

    def _ask(self, client: Conversation, turn: int, before: bytes) -> None:
        prompt = client.prompt(turn, before)
        name = f"{client.number}/{turn}"
        generation = Generation(name, tuple(prompt), client.num_answer[turn], GREEDY, frozenset())
        arrived = self._clock.now
        self._gateway.submit(generation, lambda life: self._end(client, turn, arrived, prompt, life))

    def _end(self, client: Conversation, turn: int, arrived: float, prompt: bytes, life: Life) -> None:
        failure = life.request.failure
        error = str(as_error(failure)) if failure else ""
        num_tokens = len(life.request.emitted)
        self.outcome.answers.append(
            Answer(
                (client.number, turn), arrived, life.first_at, self._clock.now, len(prompt), num_tokens,
                0 if error else cached_tokens(life), error,
            )
        )  # fmt: skip
        if turn + 1 < len(client.num_new):
            before = prompt + bytes(num_tokens)
            self._clock.after(client.think_s[turn], lambda: self._ask(client, turn + 1, before))
