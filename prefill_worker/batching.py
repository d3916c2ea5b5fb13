"""What the next engine step of a prefill worker computes. Pure: a decision over runs, no tensors."""

from dataclasses import dataclass

from prefill_worker.run_table import PrefillRun, RunTable

MAX_SCORED = 128  # a step: a position whose log-probabilities are told costs as much as a token that is chosen


@dataclass(frozen=True, slots=True)
class Planned:
    """`count` positions of one run, from its `computed` on."""

    run: PrefillRun
    count: int


def plan_step(table: RunTable, chunk_tokens: int) -> list[Planned]:
    """At most `chunk_tokens` positions, the oldest prompts first; short prompts share a step with the end of long ones.

    Of prompts whose log-probabilities are told at most MAX_SCORED positions.

    What is planned is in a step from now on (`begin_step`).
    """
    planned = []
    budget, score_budget = chunk_tokens, MAX_SCORED
    for run in table:
        is_scored = run.num_prompt_logprobs is not None
        most = min(budget, score_budget) if is_scored else budget
        count = 0 if run.is_ended or run.is_failed else min(run.num_missing, most)
        if count:
            planned.append(Planned(run, count))
            budget -= count
            score_budget -= count if is_scored else 0
    table.begin_step(step.run for step in planned)
    return planned
