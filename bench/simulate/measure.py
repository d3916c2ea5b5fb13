"""Measures real steps of a decode worker's loop on this machine for `fit`: work and seconds of each.

Uses the worker's own loop and plan, over random prompts; answers and prompts share steps as they do there.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from bench.simulate.costs import Measured, work_of
from decode_worker.interfaces import Drafts, Masks
from decode_worker.metrics import DecodeMetrics
from decode_worker.step_extras import DraftsAndMasks
from engine.engine import Engine
from engine.out_of_memory import StepFailedError
from wire.sampling import SamplingParams
from worker.chunks import build_budget
from worker.kv_cache import KVCacheManager
from worker.loop import InFlightStep, WorkerLoop
from worker.params import SequenceParams
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler

STREAMS = (1, 2, 4, 8, 16)
PROMPTS = (64, 256, 1024)  # tokens
NUM_TOKENS = 16  # per answer
CONTEXT_TOKENS = max(PROMPTS) + NUM_TOKENS
CHUNK_TOKENS = 256  # of prompts per step
ROUNDS = 2
LEASE_S = 600.0  # longer than a round
GREEDY = SamplingParams(temperature=0.0)


class MeasuredSteps(DraftsAndMasks):
    """Records the work of each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(Drafts(), Masks(), scheduler)
        self.steps: list[Measured] = []

    def judge(
        self, flight: InFlightStep, chosen: Sequence[list[int]], failed: Mapping[int, StepFailedError]
    ) -> dict[int, Exception | bool]:
        self.steps.append(Measured(work_of(flight.planned), flight.seconds))
        return super().judge(flight, chosen, failed)


def measure_steps(engine: Engine) -> list[Measured]:
    """Every mix of streams and prompts, ROUNDS times, after one round to warm up."""
    steps: list[Measured] = []
    for number in range(1 + ROUNDS):
        for streams, prompt_tokens in product(STREAMS, PROMPTS):
            found = _run(engine, streams, prompt_tokens, number)
            steps += found if number else []
    return steps


def _run(engine: Engine, streams: int, prompt_tokens: int, seed: int) -> list[Measured]:
    kv = KVCacheManager(PrefixCache(engine.num_pages, engine.pool.generations), engine.pool.shape.page_tokens)
    scheduler = Scheduler(kv, max(STREAMS), LEASE_S)
    draw, extras = np.random.default_rng(seed), MeasuredSteps(scheduler)
    loop = WorkerLoop(
        extras, scheduler, engine.runner, engine.rows, engine.pool,
        build_budget(CHUNK_TOKENS, "--chunk-tokens", engine.device.type),
        lambda _step, _updates: None, DecodeMetrics(scheduler), engine.steps_ahead,
    )  # fmt: skip
    for number in range(streams):
        prompt = draw.integers(0, engine.config.vocab_size, prompt_tokens, np.int32)
        params = SequenceParams(
            str(number), prompt.tobytes(), prompt_tokens - 1, NUM_TOKENS, handle=number + 1, sampling=GREEDY
        )
        scheduler.admit(params, time.monotonic())
    while len(scheduler):
        loop.step()
    return extras.steps
