"""The engine loop of a decode worker: plan, compute, publish. Knows the session table and the runner, no gRPC."""

import time
from collections.abc import Callable

import structlog

from decode_worker.batching import Planned, plan_step
from decode_worker.metrics import DecodeMetrics
from decode_worker.session import Delta
from decode_worker.session_table import SessionTable
from engine.batch import SequenceSlice
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
    ) -> None:
        """`publish(step, deltas)` is called on the engine thread and must not block."""
        self.thread = EngineThread(self._step, table.next_deadline)
        self._table = table
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._metrics = metrics

    def _step(self) -> bool:
        planned, expired = self._take_and_plan()
        if not planned and not expired:
            return False
        deltas = expired
        if planned:
            tokens = self._compute(planned)
            deltas += self._finish(planned, tokens)
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

    def _compute(self, planned: list[Planned]) -> list[int] | Exception:
        """One forward: a token for each planned slice that wants one, or what went wrong."""
        slices, choices = [], []
        for step in planned:
            session = step.session
            chunk = session.tokens[session.computed : session.computed + step.count]
            slices.append(SequenceSlice(chunk, session.computed, session.pages, step.wants_token))
            if step.wants_token:
                choices.append(Choice(session.sampling, position=len(session.tokens)))
        try:
            with self._metrics.step_seconds.time():
                return self._runner.run(slices, choices)
        except Exception as error:  # whatever the step's cause of death, only its own sessions die with it
            log.exception("engine step failed", request_ids=[step.session.request_id for step in planned])
            return error

    def _finish(self, planned: list[Planned], tokens: list[int] | Exception) -> list[Delta]:
        with self.thread.lock:
            if isinstance(tokens, Exception):
                return [self._table.fail(step.session, f"the engine step failed: {tokens}") for step in planned]
            chosen = iter(tokens)
            news = [
                self._table.finish_step(step.session, step.count, next(chosen) if step.wants_token else None)
                for step in planned
            ]
        self._metrics.count_step(planned)
        return [delta for delta in news if delta is not None]
