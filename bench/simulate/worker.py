"""A worker: the real scheduler, prefix cache and step plan; a step takes virtual time by `Costs`.

Steps of answers alone repeat until an answer ends, pages run short or the scheduler changes. Such a run of steps is
applied at once, like one step whose drafts were all right. Without `is_bulk` each step is planned separately, with the
same times (the slow twin).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from bench.simulate.costs import Costs, Floats, work_of
from bench.simulate.events import Clock
from bench.simulate.figures import Gaps
from worker.kv_cache import KVCacheManager, num_pages_for
from worker.params import ANY_NUMBER
from worker.plan import TokenBudget, schedule
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import Phase, ScheduledSequence, Update
from worker.tiers.kept_pages import KeptPages
from worker.tiers.key_log import KeyLog

LEASE_S = 30.0  # longer than any run: nothing fails here
NO_STEPS: Floats = np.empty(0)

Publish = Callable[[Sequence[Update]], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one worker, named like its settings."""

    num_pages: int
    max_running: int
    chunk_tokens: int  # of prompts per step
    page_tokens: int = 16
    max_offer_pages: int = ANY_NUMBER
    beside_tokens: int | None = None  # of prompts per step with answers; None: as many


class SimWorker:
    """Owns a scheduler. Callers change it within `changing`."""

    def __init__(
        self, clock: Clock, costs: Costs, limits: Limits, gaps: Gaps, is_bulk: bool = True, revision: int = 0
    ) -> None:
        """`revision`: each token of its answers."""
        order = KeptPages(limits.num_pages, limits.page_tokens, lambda: clock.now)
        cache = PrefixCache(limits.num_pages, [0] * limits.num_pages, order)
        self.keys = KeyLog()
        cache.watchers.append(self.keys)
        self.weights = f"simulated-{revision}"  # their fingerprint
        kv = KVCacheManager(cache, limits.page_tokens, self.weights, max_offer_pages=limits.max_offer_pages)
        self.scheduler = Scheduler(kv, limits.max_running, LEASE_S)
        self.revision = revision
        self.busy_s = 0.0
        self._clock = clock
        self._costs = costs
        self._budget = TokenBudget(limits.chunk_tokens, "chunk_tokens", beside_answers=limits.beside_tokens)
        self.prompt_tokens, self.prompt_s = 0, 0.0  # of all steps with prompts
        self._gaps = gaps
        self.publish: Publish = lambda _updates: None  # gets answers' first and last updates, and all of prompts
        self._is_bulk = is_bulk
        self._planned: list[ScheduledSequence] = []  # per step of the run; the scheduler has begun the first
        self._began = 0.0  # start of that step
        self._ends = NO_STEPS  # end times of the run's steps
        self._run = 0  # number of the run
        self.is_dead = False

    @contextmanager
    def changing(self) -> Iterator[Scheduler]:
        """The scheduler, up to date. Changes take part in the next step."""
        self.settle()
        yield self.scheduler
        if not len(self._ends):
            self._begin()
        elif len(self._ends) > 1:
            self._ends = self._ends[:1]
            self._await_end()

    def end(self) -> None:
        """It has died: nothing more happens."""
        self.is_dead, self._ends = True, NO_STEPS
        self._run += 1

    def settle(self) -> None:
        """Complete all steps of the run that have ended."""
        count = int(np.searchsorted(self._ends, self._clock.now, side="right"))
        if count:
            self._complete(count)
            self._ends = self._ends[count:]
            self._planned = schedule(self.scheduler, self._budget)

    def _begin(self) -> None:
        if self.is_dead:
            return
        self._planned = schedule(self.scheduler, self._budget)
        if self._planned:
            self._began = self._clock.now
            self._ends = self._costs.ends(self._began, work_of(self._planned), self._count_equal())
            self._await_end()

    def _await_end(self) -> None:
        self._run += 1
        run = self._run
        self._clock.at(float(self._ends[-1]), lambda: self._end(run), is_step_end=True)

    def _end(self, run: int) -> None:
        if run != self._run:
            return
        updates = self._complete(len(self._ends))
        self._ends = NO_STEPS
        self._begin()
        if updates:
            self.publish(updates)

    def _count_equal(self) -> int:
        """Number of equal steps that follow one another without outside changes."""
        planned, scheduler = self._planned, self.scheduler
        is_steady = all(step.count == 1 and step.sequence.first_token_at is not None for step in planned)
        if not self._is_bulk or not is_steady or scheduler.in_phase(Phase.PREEMPTED):
            return 1
        count = min(step.sequence.most_tokens - len(step.sequence.tokens) for step in planned)
        while count > 1 and self._num_new_pages(count) > scheduler.kv.cache.num_spare:
            count //= 2
        return count

    def _num_new_pages(self, count: int) -> int:
        size = self.scheduler.kv.page_tokens
        return sum(num_pages_for(step.begin + count, size) - len(step.sequence.pages) for step in self._planned)

    def _complete(self, count: int) -> list[Update]:
        """Complete the first `count` steps of the run; returns the updates to publish."""
        ends, updates = self._ends[:count], list[Update]()
        first, last = float(ends[0]), float(ends[-1])
        self.busy_s += last - self._began
        if num_prompt := sum(step.count - step.wants_token for step in self._planned if step.count > 1):
            self.prompt_tokens += num_prompt
            self.prompt_s += last - self._began  # such a step is a run of its own
        self._began = last
        for step in self._planned:
            if count > 1:
                self.scheduler.make_room(step.sequence, step.begin + count)
            if step.wants_token and step.sequence.last_token_at is not None:
                self._gaps.add(first - step.sequence.last_token_at)
        self._gaps.add_steps(np.diff(ends), len(self._planned))
        for step in self._planned:
            is_first = step.sequence.first_token_at is None
            update = self.scheduler.finish_step(step, [self.revision] * count if step.wants_token else (), last)
            if update is not None and (is_first or update.finish_reason):
                updates.append(update)
        return updates
