"""The engine loop of a decode worker: plan, compute, publish. Knows the session table and the runner, no gRPC."""

import time
from collections.abc import Callable

import structlog

from decode_worker.batching import Planned, plan_step
from decode_worker.metrics import DecodeMetrics
from decode_worker.session import Delta
from decode_worker.session_table import SessionTable
from engine.batch import SequenceSlice
from engine.out_of_memory import StepFailedError, explain_failure, is_out_of_memory
from engine.runner import Choice, Runner
from engine.thread import EngineThread

log = structlog.get_logger()


class DecodeLoop:
    """Owns the engine thread; its lock guards the session table."""

    def __init__(
        self,
        table: SessionTable,
        runner: Runner,
        chunk_tokens: int,
        publish: Callable[[int, list[Delta]], None],
        metrics: DecodeMetrics,
        pool_mib: int,
    ) -> None:
        """`publish(step, deltas)` is called on the engine thread and must not block."""
        self.thread = EngineThread(self._step, table.next_deadline)
        self._table = table
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._metrics = metrics
        self._pool_mib = pool_mib

    def _step(self) -> bool:
        planned, expired = self._take_and_plan()
        if not planned and not expired:
            return False
        deltas = expired
        if planned:
            deltas += self._finish(planned, self._compute(planned))
        self._publish(self.thread.progress().steps, deltas)
        return True

    def _take_and_plan(self) -> tuple[list[Planned], list[Delta]]:
        """What to compute now, and the ends of sessions whose KV came too late."""
        with self.thread.lock:
            preempted_before = self._table.num_preemptions
            expired = self._table.expire(time.monotonic())
            planned = plan_step(self._table, self._chunk_tokens)
            preempted = self._table.num_preemptions - preempted_before
        self._metrics.leases_expired.inc(len(expired))
        self._metrics.preemptions.inc(preempted)
        return planned, expired

    def _compute(self, planned: list[Planned]) -> list[int | Exception | None]:
        """One forward: for each planned slice its token, None when it wants none, or what went wrong.

        When the forward fails, each slice is computed alone, so that only those die that cannot be computed.
        """
        try:
            return self._forward(planned)
        except Exception as error:
            failure = self._explain(error, planned)
        if len(planned) == 1:
            return [failure]
        return [result for step in planned for result in self._compute([step])]

    def _explain(self, error: Exception, planned: list[Planned]) -> StepFailedError:
        if any(step.count > 1 for step in planned):
            culprit = ("--local-prefill-chunk-tokens", self._chunk_tokens)
        elif len(planned) > 1:
            culprit = ("--max-running", self._table.max_running)
        else:
            culprit = ("--kv-memory-mib", self._pool_mib)
        failure = explain_failure(error, *culprit)
        request_ids = [step.session.request_id for step in planned]
        log.error(
            "step not computed", reason=str(failure), request_ids=request_ids, exc_info=not is_out_of_memory(error)
        )
        return failure

    def _forward(self, planned: list[Planned]) -> list[int | Exception | None]:
        slices, choices = [], []
        for step in planned:
            session = step.session
            chunk = session.tokens[session.computed : session.computed + step.count]
            slices.append(SequenceSlice(chunk, session.computed, session.pages, num_logits=int(step.wants_token)))
            if step.wants_token:
                choices.append(Choice(session.sampling, len(session.tokens), session.tokens, session.num_prompt))
        with self._metrics.step_seconds.time():
            chosen = iter(self._runner.run(slices, choices))
        return [next(chosen).token if step.wants_token else None for step in planned]

    def _finish(self, planned: list[Planned], results: list[int | Exception | None]) -> list[Delta]:
        with self.thread.lock:
            news = [self._finish_one(step, result) for step, result in zip(planned, results, strict=True)]
        done = [step for step, result in zip(planned, results, strict=True) if not isinstance(result, Exception)]
        self._metrics.count_step(done)
        return [delta for delta in news if delta is not None]

    def _finish_one(self, step: Planned, result: int | Exception | None) -> Delta | None:
        if isinstance(result, Exception):
            return self._table.fail(step.session, str(result))
        return self._table.finish_step(step.session, step.count, result)
