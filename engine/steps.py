"""One step of a worker's loop: a forward for several sequences, which outlives those that cannot be computed."""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TypeVar

import structlog

from engine.batch import SequenceSlice
from engine.choice import Choice, Chosen
from engine.out_of_memory import StepFailedError, explain_failure, is_out_of_memory
from engine.runner import Runner

log = structlog.get_logger()

PlannedT = TypeVar("PlannedT")
Answers = list[Chosen]  # to the choices of one sequence, in their order


def run_step(runner: Runner, slices: Sequence[SequenceSlice], choices: Sequence[Sequence[Choice]]) -> list[Answers]:
    """One forward; `choices`: those of each slice, as many as it wants rows of logits."""
    chosen = iter(runner.run(slices, list(chain.from_iterable(choices))))
    return [list(islice(chosen, len(wanted))) for wanted in choices]


def compute_each(
    planned: Sequence[PlannedT],
    forward: Callable[[Sequence[PlannedT]], Sequence[Answers]],
    explain: Callable[[Exception, Sequence[PlannedT]], StepFailedError],
) -> list[Answers | StepFailedError]:
    """One forward: for each of `planned` the answers to its choices, or what went wrong.

    When the forward fails, each is computed alone, so that only those die that cannot be computed.
    """
    if not planned:
        return []
    try:
        return [*forward(planned)]
    except Exception as error:
        failure = explain(error, planned)
    if len(planned) == 1:
        return [failure]
    return [result for one in planned for result in compute_each([one], forward, explain)]


def report_failure(error: Exception, setting: str, value: int, request_ids: Sequence[str]) -> StepFailedError:
    """Log a step that failed. When memory ran out, it names the one `setting` to lower and its `value` now."""
    failure = explain_failure(error, setting, value)
    log.error("step not computed", reason=str(failure), request_ids=request_ids, exc_info=not is_out_of_memory(error))
    return failure
