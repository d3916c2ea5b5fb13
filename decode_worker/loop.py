"""What decode adds to each step: guesses and masks."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from threading import Lock

from decode_worker.grammar.constraints import Constraints, Standing
from decode_worker.speculation.speculator import Speculator, plan_guesses
from engine.out_of_memory import StepFailedError
from worker.loop import Flight, StepExtras
from worker.sequences import Planned, Update
from worker.table import SequenceTable


class DraftsAndMasks(StepExtras):
    """Owns the drafters and the grammars' states."""

    def __init__(self, speculator: Speculator, table: SequenceTable) -> None:
        self._speculator = speculator
        self._table = table
        self._constraints = Constraints()

    def extend_plan(self, planned: list[Planned], lock: Lock) -> None:
        if _may_guess(planned):
            costs = self._speculator.costs()
            if costs is not None:
                with lock:
                    plan_guesses(self._table, planned, costs, self._speculator)

    def needs_tokens(self, planned: Seq[Planned]) -> bool:
        """Guesses and masks follow from the tokens before them."""
        return any(step.num_guesses or self._constraints.concerns(step) for step in planned)

    def prepare(self, planned: list[Planned], updates: list[Update], lock: Lock) -> list[Planned]:
        """Drop answers whose grammar is complete or failed. Sequences whose masks are late sit out this step."""
        if _may_guess(planned):
            self._speculator.guess(planned)
        if not any(map(self._constraints.concerns, planned)):
            return planned
        kept = []
        standings = self._constraints.constrain(planned)
        with lock:
            for step, standing in zip(planned, standings, strict=True):
                if standing is Standing.OPEN:
                    kept.append(step)
                elif standing is Standing.LATE:
                    self._table.drop_step(step)
                else:
                    error = standing if isinstance(standing, Exception) else None
                    update = self._table.fail_step(step, error, time.monotonic())
                    updates += [update] if update is not None else []
        return kept

    def judge(
        self, flight: Flight, chosen: Seq[list[int]], failed: Mapping[int, StepFailedError]
    ) -> dict[int, Exception | bool]:
        self._speculator.note_step(flight.num_rows, flight.seconds)
        planned = flight.planned
        for index, step in enumerate(planned):
            if step.wants_token and step.sequence.job.max_draft_tokens:
                self._speculator.note_guesses(step, 0 if index in failed else len(chosen[index]) - 1)
        bound = [i for i, step in enumerate(planned) if self._constraints.concerns(step) and i not in failed]
        standings = self._constraints.follow([(planned[i].sequence, chosen[i]) for i in bound])
        return {
            i: one if isinstance(one, Exception) else one is Standing.WHOLE
            for i, one in zip(bound, standings, strict=True)
        }


def _may_guess(planned: Seq[Planned]) -> bool:
    """Whether drafters must see the step."""
    return any(step.sequence.job.max_draft_tokens for step in planned)
