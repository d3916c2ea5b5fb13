"""The engine loop of a worker: plan, launch, collect, publish. Knows schedulers and the engine, no gRPC.

With `steps_ahead` 1 the next step is planned on counts and launched before the last one is collected. Its inputs come
from the engine's rows, ends take effect one step late, and pages stay held until no launched step can touch them.
A step with drafts is in flight alone: they follow the last token, and the next step follows those that were right.
Masks are made while the forward runs, from the tokens of the step before:

    forward n+1 ─► collect n ─► masks n+1 ─► choice of tokens n+1
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

from engine.input_batch import InputBatch
from engine.kv.pool import Pool
from engine.out_of_memory import StepFailedError, report_failure
from engine.steps import LaunchedStep, Launcher, StepOutput, launch_step
from wire.logprobs import TokenLogprobs
from worker.plan import TokenBudget, schedule
from worker.rows import RowWriter
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Update
from worker.thread import EngineThread

Publish = Callable[[int, list[Update]], None]
"""(number of the step, its updates): called on the engine thread, must not block."""


@dataclass(slots=True)
class InFlightStep:
    """A launched step."""

    planned: list[ScheduledSequence]
    step: LaunchedStep
    num_rows: int  # positions computed
    needs_masks: bool  # its tokens are still to be chosen
    predicted_s: float
    started: float  # time.perf_counter()
    seconds: float = 0.0  # device time of the step, or its share


class StepExtras:
    """A role's part of its steps; this one adds nothing. Called on the engine thread, which does not hold `lock`."""

    def extend_plan(self, planned: list[ScheduledSequence], lock: Lock) -> None:
        """Reserve what the planned steps need beside their tokens."""

    def needs_device(self, planned: Seq[ScheduledSequence]) -> bool:
        """Whether `draft` computes for the step, or on the tokens of all steps before it: these are collected first."""
        return False

    def needs_masks(self, planned: Seq[ScheduledSequence]) -> bool:
        """Whether the step's choice of tokens needs masks, which follow from the tokens of all steps before it."""
        return False

    def draft(self, planned: Seq[ScheduledSequence]) -> None:
        """Add drafts to the step."""

    def prepare(self, planned: list[ScheduledSequence], updates: list[Update], lock: Lock) -> list[ScheduledSequence]:
        """Add masks to the step; drop sequences that ended or cannot take part."""
        return planned

    def complete(self, planned: Seq[ScheduledSequence], updates: list[Update], lock: Lock) -> None:
        """`prepare` for a step whose forward is launched: take back or end sequences that it would drop."""

    def accept(self, step: ScheduledSequence, tokens: Seq[int]) -> Seq[int]:
        """Which of the tokens that a step chose are the answer's, by index."""
        return range(len(tokens))

    def note_drain(self, seconds: float) -> None:
        """The device had no step for so long, as the one just launched was planned on the tokens of the last one."""

    def judge(
        self, flight: InFlightStep, chosen: Seq[list[int]], failed: Mapping[int, StepFailedError]
    ) -> dict[int, Exception | bool]:
        """The role's verdict on a step. Index |-> why an answer must fail, or whether it is complete."""
        return {}


class StepCounter:
    """Counts steps for metrics; this one does not."""

    def count_step(
        self, planned: Seq[ScheduledSequence], updates: Seq[Update], failed: Collection[int], seconds: float
    ) -> None:
        """A step is over. failed: indices of `planned`."""


class WorkerLoop:
    """Owns the engine thread; its lock guards the scheduler."""

    def __init__(
        self, extras: StepExtras, scheduler: Scheduler, runner: Launcher, rows: InputBatch, pool: Pool,
        budget: TokenBudget, publish: Publish, metrics: StepCounter, steps_ahead: int = 0,
    ) -> None:  # fmt: skip
        self._extras = extras
        self.thread = EngineThread(self.step, scheduler.next_deadline)
        self.chunks = budget.build_sizer(budget.prompt_tokens, budget.fewest_prompt_tokens)
        self._scheduler = scheduler
        self._runner = runner
        self._rows = RowWriter(rows)
        self._pool = pool
        self._budget = budget
        self._publish = publish
        self._metrics = metrics
        self._steps_ahead = steps_ahead
        self._in_flight: deque[InFlightStep] = deque()
        self._was_drained = False  # the step being planned needed the tokens of the last one
        self._last_over = 0.0  # time.perf_counter() when the last step was collected

    def step(self) -> bool:
        """Plan and launch a step, collect one. Returns whether there was work; called until there is none."""
        with self.thread.lock:
            updates = self._scheduler.expire(time.monotonic())
            dropped = self._scheduler.adapters.take_dropped()
        self._rows.drop_adapters(dropped)
        if planned := self._plan(updates):
            self._launch(planned, updates)
        is_busy = bool(planned or self._in_flight)  # collecting may free pages that other sequences need
        while len(self._in_flight) > (self._steps_ahead if planned else 0):
            updates += self._collect()
        self._complete(updates)
        if updates:
            self._publish(self.thread.steps, updates)
        return is_busy or bool(updates)

    def _plan(self, updates: list[Update]) -> list[ScheduledSequence]:
        """Plan the next step. If the plan depends on launched steps, collect these first."""
        num_in_flight = len(self._in_flight)
        while self._in_flight and _has_drafts(self._in_flight[-1].planned):
            updates += self._collect()
        planned = self._plan_once()
        if self._in_flight and (self._scheduler.is_short or self._extras.needs_device(planned)):
            with self.thread.lock:
                for step in reversed(planned):
                    self._scheduler.drop_step(step)
            while self._in_flight:
                updates += self._collect()
            planned = self._plan_once()
        self._was_drained = num_in_flight > len(self._in_flight)
        return planned

    def _plan_once(self) -> list[ScheduledSequence]:
        sizes = self.chunks
        beside = max(int(sizes.beside * self.thread.core_share), 1)  # the answers take longer then, too
        with self.thread.lock:
            budget = replace(
                self._budget, prompt_tokens=sizes.alone, beside_answers=beside, by_goal=sizes.beside_by_goal
            )
            planned = schedule(self._scheduler, budget)
        self._extras.extend_plan(planned, self.thread.lock)
        return planned

    def _launch(self, planned: list[ScheduledSequence], updates: list[Update]) -> None:
        predicted_s = self.chunks.predict(*_count(planned))
        self.thread.predicted_s = predicted_s + sum(flight.predicted_s for flight in self._in_flight)
        for step in planned:
            if step.sequence.num_pages_in_row != len(step.sequence.pages):
                self._rows.write(step.sequence)
        is_drained, began = self._was_drained, time.perf_counter()
        self._extras.draft(planned)
        started = time.perf_counter()
        drafted_s = started - began  # drafts have a cost of their own
        needs_masks = bool(self._in_flight) and self._budget.num_stages == 1 and self._extras.needs_masks(planned)
        if not needs_masks:
            planned = self._extras.prepare(planned, updates, self.thread.lock)
            if not planned:
                return
        requests = self._rows.requests(planned)
        if led := [(step, step.draft_lead) for step in planned if step.draft_lead is not None]:
            with self.thread.lock:
                for step, lead in led:
                    self._scheduler.note_draft_lead(step, lead)
        launched = launch_step(self._runner, requests, partial(self._explain, planned), needs_masks)
        if is_drained:
            self._extras.note_drain(time.perf_counter() - self._last_over - drafted_s)
        num_rows = sum(part.count for part in requests)
        self._in_flight.append(InFlightStep(planned, launched, num_rows, needs_masks, predicted_s, started))

    def _complete(self, updates: list[Update]) -> None:
        """Launch the choice of tokens of a step that waits for masks; all steps before it are collected."""
        if self._in_flight and self._in_flight[-1].needs_masks:
            flight = self._in_flight[-1]
            self._extras.complete(flight.planned, updates, self.thread.lock)
            masks = {index: self._rows.mask(step) for index, step in enumerate(flight.planned)}
            flight.step.choose({index: mask for index, mask in masks.items() if mask is not None})
            flight.needs_masks = False

    def _explain(self, step: Seq[ScheduledSequence], error: Exception, which: Seq[int]) -> StepFailedError:
        """Log why these sequences of a step failed. If memory ran out, the message names the one setting to lower."""
        planned = [step[index] for index in which]
        num_prompt = sum(step.count for step in planned if not step.is_answer)
        if num_prompt > self._scheduler.kv.page_tokens:  # no budget is smaller than a page
            culprit = (self._budget.setting, self._budget.prompt_tokens)
        elif len(planned) > 1:
            culprit = ("--max-running", self._scheduler.max_running)
        else:
            culprit = ("--kv-memory-mib", self._pool.size_mib)
        return report_failure(error, *culprit, [step.sequence.params.request_id for step in planned])

    def _collect(self) -> list[Update]:
        """Wait for the oldest launched step; returns its updates."""
        flight = self._in_flight.popleft()
        assert not flight.needs_masks, "masks follow from the steps before, which are collected"
        answers = flight.step.collect()
        now = time.perf_counter()
        # the device computes one step at a time: this one began after the last one ended
        flight.seconds = now - max(flight.started, self._last_over)
        self._last_over = now
        self.chunks.note_step(*_count(flight.planned), flight.seconds * self.thread.core_share)
        chosen = []
        for step, at in zip(flight.planned, answers.begins, strict=True):
            begin = at + step.num_scored
            tokens = answers.tokens[begin : begin + step.num_chosen]
            step.path = () if step.is_dropped else self._extras.accept(step, tokens)
            chosen.append([tokens[index] for index in step.path])
        judged = self._extras.judge(flight, chosen, answers.failed)
        with self.thread.lock:
            updates = self._finish(flight.planned, chosen, answers, judged, time.monotonic())
        self._metrics.count_step(flight.planned, updates, answers.failed, flight.seconds)
        return updates

    def _finish(
        self, planned: Seq[ScheduledSequence], chosen: Seq[list[int]], answers: StepOutput,
        judged: Mapping[int, Exception | bool], now: float,
    ) -> list[Update]:  # fmt: skip
        scheduler, updates = self._scheduler, []
        for index, (step, tokens, at) in enumerate(zip(planned, chosen, answers.begins, strict=True)):
            begin = at + step.num_scored
            verdict = answers.failed.get(index) or judged.get(index, False)
            if step.is_dropped:
                scheduler.end_step(step)
                continue
            if isinstance(verdict, Exception):
                update = scheduler.fail_step(step, verdict, now)
            else:
                given = answers.logprobs
                prompt_logprobs = _given(given, range(at, begin)) if given else ()
                logprobs = _given(given, [begin + index for index in step.path]) if given else ()
                update = scheduler.finish_step(step, tokens, now, logprobs, prompt_logprobs, verdict)
            if update is not None:
                updates.append(update)
        return updates


def _has_drafts(planned: Seq[ScheduledSequence]) -> bool:
    return any(step.drafts for step in planned)


def _count(planned: Seq[ScheduledSequence]) -> tuple[int, int]:
    """(answers, prompt tokens) in a step."""
    return sum(step.is_answer for step in planned), sum(step.count for step in planned if not step.is_answer)


def _given(logprobs: Seq[TokenLogprobs | None], which: Seq[int]) -> Seq[TokenLogprobs]:
    return [one for index in which if (one := logprobs[index]) is not None]
