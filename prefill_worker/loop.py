"""The engine loop of a prefill worker: plan, compute, publish. Knows the run table and the runner, no gRPC."""

import time
from collections.abc import Callable, Sequence

from engine.batch import SequenceSlice
from engine.choice import Choice
from engine.out_of_memory import StepFailedError
from engine.runner import Runner
from engine.sampling import SamplingParams
from engine.steps import Answers, compute_each, report_failure, run_step
from engine.thread import EngineThread
from prefill_worker.batching import Planned, plan_step
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.run_table import RunTable

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
        results = list(zip(planned, compute_each(planned, self._forward, self._explain), strict=True))
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

    def _explain(self, error: Exception, planned: Sequence[Planned]) -> StepFailedError:
        is_small = sum(step.count for step in planned) <= self._table.page_tokens  # no chunk is smaller
        culprit = ("--kv-memory-mib", self._pool_mib) if is_small else ("--chunk-tokens", self._chunk_tokens)
        return report_failure(error, *culprit, [step.run.request_id for step in planned])

    def _forward(self, planned: Sequence[Planned]) -> list[Answers]:
        """The answers are the scores of a slice's tokens, if asked for."""
        choices = [build_choices(step) for step in planned]
        slices = [build_slice(step, len(wanted)) for step, wanted in zip(planned, choices, strict=True)]
        with self._metrics.step_seconds.time():
            answers = run_step(self._runner, slices, choices)
            if self._draft_runner is not None:
                self._draft_runner.run([build_slice(step, 0) for step in planned], [])
        return answers


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
