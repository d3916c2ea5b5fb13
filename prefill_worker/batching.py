"""What the next engine step of a prefill worker computes. Pure: a decision over runs, no tensors."""

from dataclasses import dataclass

from prefill_worker.run_table import PrefillRun, RunTable


@dataclass(frozen=True, slots=True)
class Planned:
    """`count` positions of one run, from its `computed` on."""

    run: PrefillRun
    count: int


def plan_step(table: RunTable, chunk_tokens: int) -> list[Planned]:
    """At most `chunk_tokens` positions, the oldest prompts first; short prompts share a step with the end of long ones.

    What is planned is in a step from now on (`begin_step`).
    """
    planned = []
    budget = chunk_tokens
    for run in table:
        count = 0 if run.is_ended or run.is_failed else min(run.num_missing, budget)
        if count:
            planned.append(Planned(run, count))
            budget -= count
    table.begin_step(step.run for step in planned)
    return planned
