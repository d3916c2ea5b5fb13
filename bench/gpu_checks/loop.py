"""A decode worker's loop in this process, without its thread: as in a worker, one step ahead on a GPU."""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from bench.decoding import NO_SPECULATION, build_scheduler
from decode_worker.loop import DraftsAndMasks
from decode_worker.metrics import DecodeMetrics
from decode_worker.speculation.speculator import Speculator
from engine.engine import Engine
from engine.steps import Launcher
from wire.sampling import SamplingParams
from worker.chunks import ChunkSizer
from worker.loop import WorkerLoop
from worker.plan import build_budget
from worker.prefix_cache import NoRoomError
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Sequence, SequenceParams, Update

CHUNK_TOKENS = 2048
GATEWAY = "bench"


@dataclass(slots=True)
class Ran:
    """The results of all requests together."""

    chunks: ChunkSizer  # as it was in the end
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by handle
    ended: set[int] = field(default_factory=set)  # handles; the others were aborted
    full: list[tuple[float, int]] = field(default_factory=list)
    """(time after a step that yielded a token of every sequence, tokens of the first one so far)"""
    num_drafted: int = 0
    num_accepted: int = 0
    num_launched: int = 0  # steps
    num_drained: int = 0  # of these, launched while the device had nothing left to do
    num_preemptions: int = 0

    @property
    def tpot_s(self) -> float:
        """Median over `full`."""
        return statistics.median((b - a) / (n - m) for (a, m), (b, n) in pairwise(self.full) if n > m)

    @property
    def per_token_s(self) -> float:
        """Mean over `full`: with drafts, steps differ."""
        (first_s, first), (last_s, last) = self.full[0], self.full[-1]
        return (last_s - first_s) / (last - first)

    @property
    def num_steps(self) -> int:
        """That yielded tokens of all."""
        return len(self.full)

    @property
    def drained(self) -> str:
        return f"{self.num_drained} of {self.num_launched} launches drained"


class WatchedLoop(WorkerLoop):
    """Counts launches, and those for which the device has nothing left to do."""

    num_launched = num_drained = 0

    def _launch(self, planned: list[ScheduledSequence], updates: list[Update]) -> None:
        self.num_launched += 1
        self.num_drained += not self._in_flight
        super()._launch(planned, updates)


@dataclass(frozen=True, slots=True)
class Unwaiting:
    """A runner; on a GPU any wait of the host during a launch raises."""

    inner: Launcher
    device: torch.device

    def __getattr__(self, name: str) -> Any:
        def call(*parts: Any) -> Any:
            with without_waiting(self.device):
                return getattr(self.inner, name)(*parts)

        return call


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU, any wait for it raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def run_jobs(
    engine: Engine,
    requests: Seq[SequenceParams],
    speculator: Speculator = NO_SPECULATION,
    steps_ahead: int | None = None,
    num_pages: int = 0,
    at_once: int = 0,
    aborted: Mapping[int, int] = {},
    chunk_tokens: int = CHUNK_TOKENS,
    may_wait: bool = True,
) -> Ran:
    """Run a decode worker's loop until all requests have ended; then no page is held.

    steps_ahead: None for the device's default. num_pages: of the engine's; 0: all. at_once: requests admitted together;
    0: all. aborted: handle |-> number of its tokens after which it is aborted. may_wait: see `Unwaiting`.
    """
    scheduler = build_scheduler(engine, num_pages)
    runner: Any = engine.runner if may_wait else Unwaiting(engine.runner, engine.device)
    updates: list[Update] = []
    loop = WatchedLoop(
        DraftsAndMasks(speculator, scheduler), scheduler, runner, engine.rows, engine.pool,
        build_budget(chunk_tokens, "--chunk-tokens", engine.device.type), lambda _step, some: updates.extend(some),
        DecodeMetrics(scheduler), engine.steps_ahead if steps_ahead is None else steps_ahead,
    )  # fmt: skip
    ran, waiting = Ran(loop.chunks), deque(requests)
    sequences: list[Sequence] = []
    while waiting or len(scheduler):
        while waiting and len(scheduler) < (at_once or len(requests)):
            try:
                sequences.append(scheduler.admit(waiting[0], time.monotonic()))
            except NoRoomError:
                break
            waiting.popleft()
        updates.clear()
        assert loop.step(), "no step is left although requests are unfinished"
        _take(ran, updates, scheduler, aborted)
        if len([update for update in updates if update.token_ids]) == len(requests):
            ran.full.append((time.perf_counter(), len(ran.tokens[requests[0].handle])))
    scheduler.check()
    assert not scheduler.kv.cache.num_held, "pages are held after all requests"
    ran.num_drafted, ran.num_accepted, ran.num_preemptions = (
        sum(getattr(one, name) for one in sequences) for name in ("num_drafted", "num_accepted", "num_preemptions")
    )
    ran.num_launched, ran.num_drained = loop.num_launched, loop.num_drained
    return ran


def _take(ran: Ran, updates: Seq[Update], scheduler: Scheduler, aborted: Mapping[int, int]) -> None:
    for update in updates:
        handle = update.sequence.params.handle
        assert update.finish_reason != "error", f"request {handle}: {update.error}"
        own = ran.tokens.setdefault(handle, [])
        own.extend(update.token_ids)
        if update.finish_reason:
            ran.ended.add(handle)
        elif len(own) >= aborted.get(handle, len(own) + 1):
            scheduler.abort(GATEWAY, [handle])


def build_requests(
    count: int, prompt_tokens: int, num_tokens: int, vocab_size: int, drafter: str = "off", max_drafts: int = 3,
    first: int = 1, **others: Any,
) -> list[SequenceParams]:  # fmt: skip
    """Greedy requests whose prompts share nothing; handles from `first` on."""
    draw = np.random.default_rng(first)
    return [
        SequenceParams(
            str(handle), draw.integers(0, vocab_size, prompt_tokens, np.int32).tobytes(), prompt_tokens - 1, num_tokens,
            gateway=GATEWAY, handle=handle, sampling=SamplingParams(temperature=0.0), drafter=drafter,
            max_draft_tokens=0 if drafter == "off" else max_drafts, **others,
        )
        for handle in range(first, first + count)
    ]  # fmt: skip
