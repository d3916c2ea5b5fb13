"""One step of a worker's loop: a forward for several sequences that survives requests that cannot be computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import structlog

from engine.batch import ForwardRow
from engine.out_of_memory import NotNumbersError, StepFailedError, end_process, is_device_lost
from engine.runner import Begun, Launched, Masks, ModelOutput
from engine.sampling.sample import NOT_A_NUMBER
from wire.logprobs import TokenLogprobs

log = structlog.get_logger()

Explain = Callable[[Exception, Sequence[int]], StepFailedError]
"""(a forward's exception, indices of its requests) |-> why it failed. Called for the whole step and each culprit."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results for a step's rows of logits, requests in order."""

    tokens: list[int]  # -1 for each row of a failed request
    logprobs: list[TokenLogprobs | None]  # one per token; empty if no request asks for any
    failed: dict[int, StepFailedError]  # index of a request |-> why it was not computed
    begins: list[int]  # index of a request |-> its first row of logits


class Launcher(Protocol):
    """A runner, or several that compute the same positions."""

    def launch(self, requests: Sequence[ForwardRow]) -> Launched:
        """See `Runner.launch`."""
        ...

    def begin(self, requests: Sequence[ForwardRow]) -> Begun:
        """See `Runner.begin`."""
        ...

    def choose(self, begun: Begun, masks: Masks) -> Launched:
        """See `Runner.choose`."""
        ...


class LaunchedStep:
    """One forward, or several for parts of the step, and the requests that no forward could compute."""

    def __init__(self, runner: Launcher, requests: Sequence[ForwardRow], explain: Explain) -> None:
        self._runner = runner
        self._requests = requests
        self._explain = explain
        self._begun: Begun | None = None
        self._parts: list[tuple[range, Launched]] = []  # ascending
        self._failed: dict[int, StepFailedError] = {}

    def launch(self, part: range) -> None:
        """Launch the requests of `part` together; if that fails, each half separately, so that only culprits fail.

        k culprits among n requests cost O(k log n) forwards.
        """
        try:
            self._parts.append((part, self._runner.launch(self._requests[part.start : part.stop])))
            return
        except Exception as error:
            _end_if_lost(error)
            if len(part) == 1:
                self._failed[part.start] = self._explain(error, part)
                return
            if len(part) == len(self._requests):
                self._explain(error, part)
        middle = (part.start + part.stop) // 2  # outside the except block, which keeps the failed forward's memory
        self.launch(range(part.start, middle))
        self.launch(range(middle, part.stop))

    def begin(self) -> None:
        """Launch the forward of all requests: `choose` follows. If that fails, `choose` launches everything."""
        try:
            self._begun = self._runner.begin(self._requests)
        except Exception as error:
            _end_if_lost(error)

    def choose(self, masks: Masks) -> None:
        """Launch the choice of tokens. masks: index of a request |-> the tokens that it may choose."""
        every, begun = range(len(self._requests)), self._begun
        self._begun = None
        if begun is not None:
            try:
                self._parts.append((every, self._runner.choose(begun, masks)))
                return
            except Exception as error:
                _end_if_lost(error)
        self._requests = [one._replace(mask=masks.get(at, one.mask)) for at, one in enumerate(self._requests)]
        self.launch(every)

    def _fail(self, part: range, error: Exception) -> None:
        _end_if_lost(error)
        failure = self._explain(error, part)
        self._failed.update((index, failure) for index in part)

    def collect(self) -> StepOutput:
        """Wait for the device. A part that fails here is not repeated: later steps may have read its tokens."""
        begins = [0, *accumulate([one.num_logits for one in self._requests])]
        answers = StepOutput([-1] * begins.pop(), [], self._failed, begins)
        for part, launched in self._parts:
            try:
                _place(answers, launched.collect(), begins[part.start])
            except Exception as error:
                self._fail(part, error)
        if NOT_A_NUMBER in answers.tokens:
            self._fail_not_numbers(answers)
        return answers

    def _fail_not_numbers(self, answers: StepOutput) -> None:
        tokens = answers.tokens
        ends = [*answers.begins[1:], len(tokens)]
        spans = {index: slice(*span) for index, span in enumerate(zip(answers.begins, ends, strict=True))}
        which = [index for index, span in spans.items() if NOT_A_NUMBER in tokens[span]]
        failure = self._explain(NotNumbersError(), which)
        for index in which:
            self._failed[index] = failure
            tokens[spans[index]] = [-1] * self._requests[index].num_logits


def launch_step(
    runner: Launcher, requests: Sequence[ForwardRow], explain: Explain, needs_masks: bool = False
) -> LaunchedStep:
    """Takes at least one request. Ends the process if the GPU is lost. needs_masks: `LaunchedStep.choose` follows."""
    step = LaunchedStep(runner, requests, explain)
    if needs_masks:
        step.begin()
    else:
        step.launch(range(len(requests)))
    return step


def _place(step: StepOutput, part: ModelOutput, begin: int) -> None:
    end = begin + len(part.tokens)
    step.tokens[begin:end] = part.tokens
    if part.logprobs:
        if not step.logprobs:
            step.logprobs[:] = [None] * len(step.tokens)
        step.logprobs[begin:end] = part.logprobs


def _end_if_lost(error: Exception) -> None:
    if is_device_lost(error):
        log.critical("the GPU is lost; this process ends", reason=str(error))
        end_process()
