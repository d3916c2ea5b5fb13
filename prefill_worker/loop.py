"""The engine loop of a prefill worker: plan, compute, publish. Knows the run table and the runner, no gRPC."""

import time
from collections.abc import Callable

import structlog

from engine.batch import SequenceSlice
from engine.runner import Runner
from engine.thread import EngineThread
from prefill_worker.batching import Planned, plan_step
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.run_table import RunTable

log = structlog.get_logger()


class PrefillLoop:
    """Owns the engine thread; its lock guards the run table."""

    def __init__(
        self,
        table: RunTable,
        runner: Runner,
        chunk_tokens: int,
        publish: Callable[[list[Planned], float, Exception | None], None],
        metrics: PrefillMetrics,
    ) -> None:
        """`publish(planned, started, error)` is called on the engine thread after each step and must not block."""
        self.thread = EngineThread(self._step)
        self._table = table
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._metrics = metrics

    def _step(self) -> bool:
        with self.thread.lock:
            planned = plan_step(self._table, self._chunk_tokens)
        if not planned:
            return False
        started = time.monotonic()
        error = self._compute(planned)
        with self.thread.lock:
            for step in planned:
                if error:
                    self._table.fail_step(step.run)
                else:
                    self._table.finish_step(step.run, step.count)
        if not error:
            self._metrics.prompt_tokens.inc(sum(step.count for step in planned))
        self._publish(planned, started, error)
        return True

    def _compute(self, planned: list[Planned]) -> Exception | None:
        """One forward without logits; what went wrong, if anything."""
        slices = []
        for step in planned:
            run = step.run
            chunk = run.prompt_ids[run.computed : run.computed + step.count]
            slices.append(SequenceSlice(chunk, run.computed, run.pages, wants_logits=False))
        try:
            with self._metrics.step_seconds.time():
                self._runner.run(slices, [])
        except Exception as error:  # whatever the step's cause of death, only its own prompts die with it
            log.exception("engine step failed", request_ids=[step.run.request_id for step in planned])
            return error
        return None
