"""Metrics of decode workers only."""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

from worker.metrics import WorkerMetrics
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Update


class DecodeMetrics(WorkerMetrics):
    """`prompt_tokens` counts local prefill and recomputation: 0 while prefill workers serve and pages suffice."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.draft_tokens = self.counter("spec_draft_tokens", "Tokens drafted")
        self.accepted_tokens = self.counter("spec_accepted_tokens", "Tokens drafted that were right")
        self.grammars = self.counter("grammars", "Found in the cache, compiled, refused or failed", ("result",))
        self.grammar_seconds = self.histogram("grammar_compile_seconds", "Time to compile one, waiting included")

    def count_step(
        self, planned: Seq[ScheduledSequence], updates: Iterable[Update], failed: Collection[int], seconds: float
    ) -> None:
        super().count_step(planned, updates, failed, seconds)
        drafted = [step for i, step in enumerate(planned) if step.drafts and i not in failed]
        if drafted:
            self.draft_tokens.inc(sum(len(step.drafts) for step in drafted))
            self.accepted_tokens.inc(sum(max(len(step.path) - 1, 0) for step in drafted))
