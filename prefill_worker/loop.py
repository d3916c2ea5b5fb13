"""The engine loop of a prefill worker: plan, compute, publish. Knows the run table and the runner, no gRPC."""

import time
from collections.abc import Callable
from itertools import islice

import structlog

from engine.batch import SequenceSlice
from engine.choice import Choice, Chosen
from engine.out_of_memory import StepFailedError, explain_failure, is_out_of_memory
from engine.runner import Runner
from engine.sampling import SamplingParams
from engine.thread import EngineThread
from prefill_worker.batching import Planned, plan_step
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.run_table import RunTable

log = structlog.get_logger()

UNUSED = SamplingParams(temperature=0.0)  # nothing is chosen here


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
        draft_runner: Runner | None = None,
    ) -> None:
        """`publish(planned, started, error)` is called on the engine thread after each step and must not block.

        Once for what was computed, and once for each prompt that could not be. `draft_runner`: computes the draft
        model's KV, which goes with the model's in the same pages and offers.
        """
        self.thread = EngineThread(self._step)
        self._table = table
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._metrics = metrics
        self._pool_mib = pool_mib
        self._draft_runner = draft_runner

    def _step(self) -> bool:
        with self.thread.lock:
            planned = plan_step(self._table, self._chunk_tokens)
        if not planned:
            return False
        started = time.monotonic()
        results = list(zip(planned, self._compute(planned), strict=True))
        done = [(step, scores) for step, scores in results if not isinstance(scores, StepFailedError)]
        failed = [(step, error) for step, error in results if isinstance(error, StepFailedError)]
        with self.thread.lock:
            for step, scores in done:
                told = [score.logprobs for score in scores if score.logprobs is not None]
                self._table.finish_step(step.run, step.count, told)
            for step, _error in failed:
                self._table.fail_step(step.run)
        self._metrics.prompt_tokens.inc(sum(step.count for step, _scores in done))
        if done:
            self._publish([step for step, _scores in done], started, None)
        for step, error in failed:
            self._publish([step], started, error)
        return True

    def _compute(self, planned: list[Planned]) -> list[list[Chosen] | StepFailedError]:
        """One forward: for each planned slice the scores of its tokens if asked for, or what went wrong.

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
        is_small = sum(step.count for step in planned) <= self._table.page_tokens  # no chunk is smaller
        culprit = ("--kv-memory-mib", self._pool_mib) if is_small else ("--chunk-tokens", self._chunk_tokens)
        failure = explain_failure(error, *culprit)
        request_ids = [step.run.request_id for step in planned]
        log.error(
            "step not computed", reason=str(failure), request_ids=request_ids, exc_info=not is_out_of_memory(error)
        )
        return failure

    def _forward(self, planned: list[Planned]) -> list[list[Chosen] | StepFailedError]:
        choices = [build_choices(step) for step in planned]
        slices = [build_slice(step, len(wanted)) for step, wanted in zip(planned, choices, strict=True)]
        with self._metrics.step_seconds.time():
            chosen = iter(self._runner.run(slices, [choice for wanted in choices for choice in wanted]))
            if self._draft_runner is not None:
                self._draft_runner.run([build_slice(step, 0) for step in planned], [])
        return [list(islice(chosen, len(wanted))) for wanted in choices]


def build_slice(step: Planned, num_logits: int) -> SequenceSlice:
    """The positions that a step computes of a prompt."""
    run, begin = step.run, step.run.computed
    return SequenceSlice(run.prompt_ids[begin : begin + step.count], begin, run.pages, num_logits)


def build_choices(step: Planned) -> list[Choice]:
    """The tokens after the step's positions, to be scored; none unless the prompt's log-probabilities are wanted."""
    run = step.run
    if run.num_prompt_logprobs is None:
        return []
    return [
        Choice(
            UNUSED, position, run.prompt_ids, len(run.prompt_ids), num_logprobs=run.num_prompt_logprobs, is_given=True
        )
        for position in range(run.computed + 1, run.computed + 1 + step.count)
    ]
