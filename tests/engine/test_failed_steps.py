"""A step that cannot be computed fails only the requests that cause it."""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import steps
from engine.batch import ForwardRow
from engine.out_of_memory import StepFailedError, explain_failure, is_device_lost
from engine.runner import Begun, Launched, Masks, ModelOutput, Runner
from engine.sampling.sample import NOT_A_NUMBER
from engine.steps import StepOutput, launch_step
from wire.logprobs import TokenLogprobs


class Done:
    """A launched step."""

    def __init__(self, answers: ModelOutput, error: Exception | None) -> None:
        self._answers = answers
        self._error = error

    def collect(self) -> ModelOutput:
        if self._error is not None:
            raise self._error
        return self._answers


class PoisonedRunner:
    """Fails if a poisoned row is in the step; otherwise a token encodes its row and rank."""

    def __init__(self, poison: Sequence[int], error: Exception, is_late: bool = False) -> None:
        self._poison = poison
        self._error = error
        self._is_late = is_late  # fails when collected
        self.num_forwards = 0
        self.fails_at_choice = False  # else when it begins
        self.masked: set[int] = set()  # rows that came with masks

    def begin(self, requests: Sequence[ForwardRow]) -> Begun:
        if not self.fails_at_choice:
            self.launch(requests)
        return cast(Begun, requests)

    def choose(self, begun: Begun, masks: Masks) -> Launched:
        requests = cast(Sequence[ForwardRow], begun)
        return self.launch([one._replace(mask=masks.get(at)) for at, one in enumerate(requests)])

    def launch(self, requests: Sequence[ForwardRow]) -> Launched:
        self.masked |= {one.row for one in requests if one.mask is not None}
        self.num_forwards += 1
        is_poisoned = any(one.row in self._poison for one in requests)
        if is_poisoned and not self._is_late:
            raise self._error
        tokens = [10 * one.row + rank for one in requests for rank in range(one.num_logits)]
        logprobs = [TokenLogprobs(-float(token)) for token in tokens if requests[0].chosen_logprobs is not None]
        return cast(Launched, Done(ModelOutput(tokens, [*logprobs]), self._error if is_poisoned else None))


class Explained:
    """Records requests for explanations."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def __call__(self, error: Exception, part: Sequence[int]) -> StepFailedError:
        self.parts.append(list(part))
        return explain_failure(error, "--max-running", 64)


@given(size=st.integers(1, 40), fails_at_choice=st.booleans(), data=st.data())
def test_culprits_alone_fail_in_steps_that_wait_for_masks(
    size: int, fails_at_choice: bool, data: st.DataObject
) -> None:
    """Only one forward waits for masks at a time: parts of a step would share a graph's buffers."""
    rows = st.sets(st.integers(0, size - 1), max_size=5)
    poison, masked = data.draw(rows), data.draw(rows)
    runner = PoisonedRunner([*poison], RuntimeError("cannot compute this"))
    runner.fails_at_choice = fails_at_choice
    requests = [ForwardRow(row, 5, 1, num_logits=1) for row in range(size)]
    step = launch_step(cast(Runner, runner), requests, Explained(), needs_masks=True)
    step.choose({row: np.zeros((1, 1), np.int32) for row in masked})
    answers = step.collect()
    assert answers.failed.keys() == poison and runner.masked == masked
    assert answers.tokens == [-1 if row in poison else 10 * row for row in range(size)]


def run(runner: PoisonedRunner, requests: Sequence[ForwardRow], explain: Explained | None = None) -> StepOutput:
    return launch_step(cast(Runner, runner), requests, explain or Explained()).collect()


@given(size=st.integers(1, 80), data=st.data())
def test_culprits_alone_fail_and_few_forwards_are_spent(size: int, data: st.DataObject) -> None:
    poison = data.draw(st.sets(st.integers(0, size - 1), max_size=5))
    requests = [ForwardRow(row, 5, 1 + row % 3, num_logits=row % 3, chosen_logprobs=0) for row in range(size)]
    runner = PoisonedRunner([*poison], RuntimeError("cannot compute this"))
    answers = run(runner, requests)
    assert answers.failed.keys() == poison
    assert {str(failure) for failure in answers.failed.values()} <= {"the engine step failed: cannot compute this"}
    assert answers.tokens == [
        -1 if row in poison else 10 * row + rank for row in range(size) for rank in range(row % 3)
    ]
    scores = [None if token < 0 else TokenLogprobs(-float(token)) for token in answers.tokens]
    assert answers.logprobs == (scores if any(scores) else [])
    # each culprit fails once at each depth of halving, and each failure but the last costs two forwards
    assert runner.num_forwards <= 1 + 2 * len(poison) * math.ceil(math.log2(size))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried")])
def test_out_of_memory_is_halved_too(error: Exception) -> None:
    explain = Explained()
    answers = run(PoisonedRunner([2], error), [ForwardRow(row, 5, 1, 1) for row in range(4)], explain)
    assert answers.tokens == [0, 10, -1, 30]
    assert "lower --max-running" in str(answers.failed[2])
    assert explain.parts == [[0, 1, 2, 3], [2]], "the whole step and the culprit, not the halves between"


def test_a_failure_at_collection_is_not_repeated() -> None:
    runner = PoisonedRunner([1], RuntimeError("too late"), is_late=True)
    answers = run(runner, [ForwardRow(row, 5, 1, 1) for row in range(3)])
    assert runner.num_forwards == 1 and answers.tokens == [-1] * 3
    assert [str(answers.failed[row]) for row in range(3)] == ["the engine step failed: too late"] * 3


def test_rows_without_numbers_fail_their_slices_alone() -> None:
    class NanRunner(PoisonedRunner):
        def launch(self, requests: Sequence[ForwardRow]) -> Launched:
            tokens = [NOT_A_NUMBER if one.row == 1 and rank else one.row for one in requests for rank in range(2)]
            return cast(Launched, Done(ModelOutput(tokens, []), None))

    explain = Explained()
    answers = run(NanRunner([], ValueError()), [ForwardRow(row, 5, 2, 2) for row in range(3)], explain)
    assert answers.tokens == [0, 0, -1, -1, 2, 2]
    assert answers.failed.keys() == {1} and "logits are NaN" in str(answers.failed[1])
    assert explain.parts == [[1]]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_lost_gpu_ends_the_process(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class EndedError(BaseException):
        pass

    def end() -> None:
        raise EndedError

    monkeypatch.setattr(steps, "end_process", end)
    runner = PoisonedRunner([1], torch.AcceleratorError("CUDA error: an illegal memory access"), is_late)
    with pytest.raises(EndedError):
        run(runner, [ForwardRow(row, 5, 1, 1) for row in range(3)])
    assert runner.num_forwards == 1


def test_which_errors_mean_a_lost_gpu() -> None:
    assert is_device_lost(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_device_lost(RuntimeError("CUDA error: out of memory"))
    assert not is_device_lost(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_device_lost(ValueError("the mask does not fit"))
