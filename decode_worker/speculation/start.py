"""Builds a worker's drafters at start, and measures what forwards cost before the first request comes."""

import time

import numpy as np

from decode_worker.speculation.costs import CostMeter
from decode_worker.speculation.drafters import Drafter, ModelDrafter, NgramDrafter
from decode_worker.speculation.speculator import Speculator
from engine.batch import ForwardRow
from engine.engine import NO_DRAFTS, Engine
from engine.input_batch import InputBatch
from engine.runner import Runner
from runtime.config import DecodeConfig
from runtime.settings import ConfigError
from wire.sampling import SamplingParams
from worker.thread import call_in_thread

MEASURED_ROWS = (1, 16, 4, 64, 8, 32, 2)  # in the order of what is missed most when time runs out
BUDGET_S = 1.0  # for each model; later steps are measured while they run, so a slow machine measures less here


def build_speculator(engine: Engine, config: DecodeConfig) -> Speculator:
    """A drafter for repeats and, with a draft model, one for that. Nobody may hold page 0 yet: it is written to."""
    if engine.states is not None:
        if config.speculate not in ("auto", "off"):
            raise ConfigError(f"speculate={config.speculate!r} cannot be used: {NO_DRAFTS}: set --speculate off")
        return Speculator({}, _measure_aside(engine.runner, engine.rows), "off", config.max_draft_tokens)
    is_ahead = bool(engine.steps_ahead if config.steps_ahead is None else config.steps_ahead)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter()}
    if engine.draft_runner is not None:
        meter = _measure_aside(engine.draft_runner, engine.rows)
        drafters["draft"] = ModelDrafter(engine.draft_runner, meter, config.local_prefill_chunk_tokens, is_ahead)
    elif config.speculate == "draft":
        raise ConfigError("speculate='draft' cannot be used: --speculate draft needs a --draft-model")
    meter = _measure_aside(engine.runner, engine.rows)
    graphs = engine.runner.graph_shapes or None  # without any, drafts leave no graph
    return Speculator(drafters, meter, config.speculate, config.max_draft_tokens, is_ahead, graphs)


def _measure_aside(runner: Runner, rows: InputBatch) -> CostMeter:
    return call_in_thread(lambda: measure(runner, rows))  # see build_rank_engine


def measure(runner: Runner, rows: InputBatch) -> CostMeter:
    """What forwards of one-token sequences take."""
    meter = CostMeter()
    counts = [count for count in MEASURED_ROWS if count <= rows.num_rows]
    for row in range(max(counts)):
        rows.open(row, np.zeros(1, np.int32), SamplingParams(temperature=0.0), 1)
        rows.write_pages(row, 0, [0])
    _time(runner, 1)  # the first one allocates and warms up
    began = time.perf_counter()
    for count in counts:
        taken = _time(runner, count)
        if time.perf_counter() - began < BUDGET_S:
            taken = min(taken, _time(runner, count))
        meter.note(count, taken)
        if time.perf_counter() - began > BUDGET_S:
            break
    for row in range(max(counts)):
        rows.close(row)
    return meter


def _time(runner: Runner, count: int) -> float:
    started = time.perf_counter()
    runner.launch([ForwardRow(row, 0, 1, num_logits=1, state_to=0) for row in range(count)]).collect()
    return time.perf_counter() - started
