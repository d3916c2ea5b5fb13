"""Builds a worker's drafters at start, and measures what forwards cost before the first request comes."""

import time

from decode_worker.speculation.costs import CostMeter
from decode_worker.speculation.drafters import Drafter, ModelDrafter, NgramDrafter
from decode_worker.speculation.speculator import Speculator
from engine.batch import SequenceSlice
from engine.choice import Choice
from engine.engine import Engine
from engine.runner import Runner
from engine.sampling import SamplingParams
from runtime.config import DecodeConfig
from runtime.settings import ConfigError

MEASURED_ROWS = (1, 16, 4, 64, 8, 32, 2)  # in the order of what is missed most when time runs out
BUDGET_S = 1.0  # for each model; its first two sizes are measured whatever they take


def build_speculator(engine: Engine, config: DecodeConfig) -> Speculator:
    """A drafter for repeats and, with a draft model, one for that. Nobody may hold page 0 yet: it is written to."""
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter()}
    if engine.draft_runner is not None:
        meter = measure(engine.draft_runner)
        drafters["draft"] = ModelDrafter(engine.draft_runner, meter, config.local_prefill_chunk_tokens)
    elif config.speculate == "draft":
        raise ConfigError("speculate='draft' cannot be used: --speculate draft needs a --draft-model")
    return Speculator(drafters, measure(engine.runner), config.speculate, config.max_draft_tokens)


def measure(runner: Runner) -> CostMeter:
    """What forwards of one-token sequences take."""
    meter = CostMeter()
    _time(runner, 1)  # the first one allocates and warms up
    began = time.perf_counter()
    for index, rows in enumerate(MEASURED_ROWS):
        if index >= 2 and time.perf_counter() - began > BUDGET_S:
            break
        meter.note(rows, min(_time(runner, rows), _time(runner, rows)))
    return meter


def _time(runner: Runner, rows: int) -> float:
    slices = [SequenceSlice([0], 0, [0], num_logits=1)] * rows
    choices = [Choice(SamplingParams(temperature=0.0), 1, [0], 1)] * rows
    started = time.perf_counter()
    runner.run(slices, choices)
    return time.perf_counter() - started
