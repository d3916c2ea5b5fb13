"""The engine loop of a prefill worker: plan, compute, publish. Knows the run table and the runner, no gRPC."""

import time
from collections.abc import Callable

import structlog

from engine.batch import SequenceSlice
from engine.out_of_memory import StepFailedError, explain_failure, is_out_of_memory
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
        pool_mib: int,
    ) -> None:
        """`publish(planned, started, error)` is called on the engine thread after each step and must not block.

        Once for what was computed, and once for each prompt that could not be.
        """
        self.thread = EngineThread(self._step)
        self._table = table
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._metrics = metrics
        self._pool_mib = pool_mib

    def _step(self) -> bool:
        with self.thread.lock:
            planned = plan_step(self._table, self._chunk_tokens)
        if not planned:
            return False
        started = time.monotonic()
        errors = self._compute(planned)
        failed = [(step, error) for step, error in zip(planned, errors, strict=True) if error is not None]
        done = [step for step, error in zip(planned, errors, strict=True) if error is None]
        with self.thread.lock:
            for step in done:
                self._table.finish_step(step.run, step.count)
            for step, _error in failed:
                self._table.fail_step(step.run)
        self._metrics.prompt_tokens.inc(sum(step.count for step in done))
        if done:
            self._publish(done, started, None)
        for step, error in failed:
            self._publish([step], started, error)
        return True

    def _compute(self, planned: list[Planned]) -> list[Exception | None]:
        """One forward without logits: for each planned slice what went wrong, if anything.

        When the forward fails, each slice is computed alone, so that only those die that cannot be computed.
        """
        try:
            self._forward(planned)
            return [None] * len(planned)
        except Exception as error:
            failure = self._explain(error, planned)
        if len(planned) == 1:
            return [failure]
        return [result for step in planned for result in self._compute([step])]

    def _explain(self, error: Exception, planned: list[Planned]) -> StepFailedError:
        is_small = sum(step.count for step in planned) <= self._table.page_tokens  # no chunk is smaller
        culprit = ("--kv-memory-mib", self._pool_mib) if is_small else ("--chunk-tokens", self._chunk_tokens)
        failure = explain_failure(error, *culprit)
        request_ids = [step.run.request_id for step in planned]
        log.error(
            "step not computed", reason=str(failure), request_ids=request_ids, exc_info=not is_out_of_memory(error)
        )
        return failure

    def _forward(self, planned: list[Planned]) -> None:
        slices = []
        for step in planned:
            run = step.run
            chunk = run.prompt_ids[run.computed : run.computed + step.count]
            slices.append(SequenceSlice(chunk, run.computed, run.pages, num_logits=0))
        with self._metrics.step_seconds.time():
            self._runner.run(slices, [])
