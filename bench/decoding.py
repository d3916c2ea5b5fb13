"""A decode worker's engine loop without its process: requests in, tokens out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

from decode_worker.loop import DraftsAndMasks
from decode_worker.metrics import DecodeMetrics
from decode_worker.speculation.drafters import Drafter
from decode_worker.speculation.lengths import CostMeter
from decode_worker.speculation.speculator import Speculator
from engine.engine import Engine
from wire.logprobs import TokenLogprobs
from worker.kv_cache import KVCacheManager
from worker.loop import WorkerLoop
from worker.plan import TokenBudget
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler, num_rows_for
from worker.sequences import SequenceParams, Update

NO_SPECULATION = Speculator({}, CostMeter(), "off", 0)
PATIENCE_S = 600.0
NOT_SPARING = 1e-9  # seconds per row: makes forwards seem to cost the same for any number of rows


@dataclass
class Answers:
    """The sequences' results, by handle."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ends: dict[int, Update] = field(default_factory=dict)

    def take(self, updates: Sequence[Update]) -> None:
        for update in updates:
            handle = update.sequence.params.handle
            self.tokens.setdefault(handle, []).extend(update.token_ids)
            self.logprobs.setdefault(handle, []).extend(update.logprobs)
            self.prompt_logprobs.setdefault(handle, []).extend(update.prompt_logprobs)
            if update.finish_reason:
                self.ends[handle] = update


class FixedCosts(CostMeter):
    """Costs that steps do not change."""

    def end_step(self) -> None:
        pass

    def note(self, rows: int, seconds: float) -> None:
        if len(self._known) < 2:
            super().note(rows, seconds)


def build_eager_speculator(
    drafters: Mapping[str, Drafter], is_ahead: bool = False, step_s: float = 0.0
) -> Speculator:  # fmt: skip
    """A speculator that drafts as many tokens as allowed: rows seem free, as on a GPU.

    step_s: what every forward takes; 0: what steps measure.
    """
    meter = FixedCosts() if step_s else CostMeter()
    for rows in (1, 256):
        meter.note(rows, (step_s or 1.0) + rows * NOT_SPARING)
    return Speculator(drafters, meter, "off", 0, is_ahead)


def build_scheduler(engine: Engine, num_pages: int = 0) -> Scheduler:
    """A scheduler for as many sequences as the engine has rows, with an empty cache.

    num_pages: of the engine's; 0: all.
    """
    cache = PrefixCache(num_pages or engine.num_pages, engine.pool.generations)
    max_running = engine.rows.num_rows // num_rows_for(1)
    return Scheduler(KVCacheManager(cache, engine.pool.shape.page_tokens), max_running, lease_s=PATIENCE_S)


def decode(
    engine: Engine, speculator: Speculator, requests: Sequence[SequenceParams], chunk_tokens: int = 64
) -> Answers:
    """Run all requests together, prefill included, until they end; afterwards no page is held."""
    scheduler, answers, is_done = build_scheduler(engine), Answers(), Event()

    def publish(_step: int, updates: list[Update]) -> None:
        answers.take(updates)
        if len(answers.ends) == len(requests):
            is_done.set()

    metrics, budget = DecodeMetrics(scheduler), TokenBudget(chunk_tokens, "chunk_tokens")
    loop = WorkerLoop(
        DraftsAndMasks(speculator, scheduler),
        scheduler,
        engine.runner,
        engine.rows,
        engine.pool,
        budget,
        publish,
        metrics,
    )
    for params in requests:
        scheduler.admit(params, 0.0)
    loop.thread.start()
    try:
        assert is_done.wait(PATIENCE_S), f"{len(answers.ends)} of {len(requests)} ended"
    finally:
        loop.thread.stop(10)
    scheduler.check()
    assert not scheduler.kv.cache.num_held
    return answers
