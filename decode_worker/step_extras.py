"""Adds drafts and masks to each step of a decode worker."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import count
from threading import Lock

from decode_worker.interfaces import Drafts, Masks, Standing
from engine.out_of_memory import StepFailedError
from worker.loop import InFlightStep, StepExtras
from worker.scheduler import Scheduler
from worker.sequences import Phase, ScheduledSequence, Update


class DraftsAndMasks(StepExtras):
    """Drafts first, then masks for them."""

    def __init__(self, drafts: Drafts, masks: Masks, scheduler: Scheduler) -> None:
        self._drafts = drafts
        self._masks = masks
        self._scheduler = scheduler

    def extend_plan(self, planned: list[ScheduledSequence], lock: Lock) -> None:
        with lock:
            self._drafts.plan(self._scheduler, planned)

    def needs_device(self, planned: Seq[ScheduledSequence]) -> bool:
        return self._drafts.needs_device(planned)

    def needs_masks(self, planned: Seq[ScheduledSequence]) -> bool:
        return any(map(self._masks.concerns, planned))

    def draft(self, planned: Seq[ScheduledSequence]) -> None:
        self._drafts.draft(planned)

    def prepare(self, planned: list[ScheduledSequence], updates: list[Update], lock: Lock) -> list[ScheduledSequence]:
        """Drop answers whose grammar is complete or failed. Sequences whose masks are late sit out this step."""
        if not self.needs_masks(planned):
            return planned
        kept = []
        standings = self._masks.constrain(planned)
        with lock:
            for step, standing in zip(planned, standings, strict=True):
                if standing is Standing.OPEN:
                    kept.append(step)
                    continue
                if standing is Standing.LATE:
                    self._scheduler.drop_step(step)
                else:
                    update = self._scheduler.fail_step(step, _error_of(standing), time.monotonic())
                    updates += [update] if update else []
        return kept

    def complete(self, planned: Seq[ScheduledSequence], updates: list[Update], lock: Lock) -> None:
        going = [step for step in planned if step.sequence.phase is not Phase.ENDED]
        standings = self._masks.constrain(going)
        with lock:
            for step, standing in zip(going, standings, strict=True):
                if standing is Standing.LATE:
                    self._scheduler.take_back(step)
                elif standing is not Standing.OPEN and step.sequence.phase is not Phase.ENDED:
                    updates.append(self._scheduler.end_answer(step.sequence, _error_of(standing), time.monotonic()))

    def accept(self, step: ScheduledSequence, tokens: Seq[int]) -> Seq[int]:
        """Drop the tokens after wrong drafts; [0] has seen no draft, [i + 1] draft i and those before it on its path.

        A token is a function of its logits, parameters, seed and position (`engine.sampling`), so plain decoding gives
        one answer. What the model chooses after right drafts is that answer's next token; after a wrong one it has seen
        a wrong text. So the step gives the right drafts and one token more, whatever the drafter proposes.
        """
        if not step.drafts or tokens[0] < 0:
            return range(len(tokens))
        path = [0]
        for index, (draft, parent) in enumerate(zip(step.drafts, step.parents or count(), strict=False), 1):
            if parent == path[-1] and draft == tokens[parent]:
                path.append(index)
        step.sequence.num_drafted += len(step.drafts)
        step.sequence.num_accepted += len(path) - 1
        return path

    def note_drain(self, seconds: float) -> None:
        self._drafts.note_drain(seconds)

    def judge(
        self, flight: InFlightStep, chosen: Seq[list[int]], failed: Mapping[int, StepFailedError]
    ) -> dict[int, Exception | bool]:
        self._drafts.note_step(flight.planned, flight.num_rows, flight.seconds)
        planned = flight.planned
        taken = [i for i, step in enumerate(planned) if step.wants_token and not step.is_dropped]
        for i in taken:
            if planned[i].sequence.params.max_draft_tokens:
                self._drafts.note_drafts(planned[i], () if i in failed else chosen[i])
        bound = [
            i for i in taken
            if planned[i].sequence.params.grammar and i not in failed and planned[i].sequence.phase is not Phase.ENDED
        ]  # fmt: skip
        standings = self._masks.follow([(planned[i].sequence, chosen[i]) for i in bound])
        return {
            i: one if isinstance(one, Exception) else one is Standing.WHOLE
            for i, one in zip(bound, standings, strict=True)
        }


def _error_of(standing: Standing | Exception) -> Exception | None:
    """None where the answer is complete."""
    return standing if isinstance(standing, Exception) else None
