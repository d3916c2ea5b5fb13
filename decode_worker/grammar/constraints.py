"""Keeps answers to their grammars within the step's time: masks before a step, its tokens followed after it.

Runs on the engine thread. xgrammar is called on another (step_thread.py), so that no call blocks the engine for long.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from functools import partial
from time import thread_time
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import structlog
from numpy.typing import NDArray

from decode_worker.grammar.errors import GrammarFailedError, GrammarMismatchError
from decode_worker.grammar.fair_share import FairShare
from decode_worker.grammar.limits import MAX_STEP_CPU_S, MAX_STUCK_CPU_S, MAX_TURN_CPU_S
from decode_worker.grammar.matcher import Grammar, Matcher
from decode_worker.grammar.step_thread import Done, NoThreadError, StepThread
from worker.sequences import ScheduledSequence, Sequence

T = TypeVar("T")
log = structlog.get_logger()


class Standing(Enum):
    """How an answer stands with its grammar."""

    OPEN = "it may continue"
    WHOLE = "it is complete"
    LATE = "there was no time: it continues in a later step"


_NO_TURN: Done[Any] = Done(Standing.LATE, 0.0)


@dataclass(slots=True)
class _Bound:
    """An answer and its grammar."""

    sequence: Sequence
    grammar: Grammar
    matcher: Matcher | None = None  # how far the answer has come


class Constraints:
    """Follows the grammars of a worker's answers step by step. An exception as a result ends its sequence."""

    def __init__(self) -> None:
        self._thread = StepThread()
        self._fair_share = FairShare()
        self._bound: WeakKeyDictionary[Sequence, _Bound] = WeakKeyDictionary()

    def concerns(self, step: ScheduledSequence) -> bool:
        """Whether the step chooses tokens that must match a grammar."""
        return step.sequence.params.grammar is not None and step.wants_token

    def constrain(self, planned: Seq[ScheduledSequence]) -> list[Standing | Exception]:
        """Give the steps masks for the tokens they choose, and drop drafts that their grammars refuse.

        OPEN if the step can be computed; otherwise why not.
        """
        standings: dict[int, Standing | Exception] = {}
        bound = {step.sequence.id: step for step in planned if self.concerns(step)}
        order = self._fair_share.order(list(bound))
        work = [self._find(bound[number].sequence) for number in order]
        done = self._do(work, [partial(_constrain, one, bound[one.sequence.id].drafts) for one in work])
        for number, one in zip(order, done, strict=True):
            if one is _NO_TURN:
                self._fair_share.waited(number)
            else:
                self._fair_share.took(number, one.cpu_s)
            if isinstance(one.result, np.ndarray):
                bound[number].mask = one.result
                bound[number].drafts = bound[number].drafts[: len(one.result) - 1]
                bound[number].num_drafted = len(bound[number].drafts)
            else:
                standings[number] = one.result
        own = [standings.get(step.sequence.id, Standing.OPEN) for step in planned]
        return [one if self.concerns(step) else Standing.OPEN for one, step in zip(own, planned, strict=True)]

    def follow(self, chosen: Seq[tuple[Sequence, Seq[int]]]) -> list[Standing | Exception]:
        """How each answer stands after its next tokens. `constrain` catches up with one that is late."""
        work = [self._find(sequence) for sequence, _tokens in chosen]
        done = self._do(work, [partial(_follow, one, tokens) for one, (_, tokens) in zip(work, chosen, strict=True)])
        return [one.result for one in done]

    def _find(self, sequence: Sequence) -> _Bound:
        bound = self._bound.get(sequence)
        if bound is None:
            assert isinstance(sequence.params.grammar, Grammar)
            bound = self._bound[sequence] = _Bound(sequence, sequence.params.grammar)
        return bound

    def _do(self, answers: Seq[_Bound], work: Seq[Callable[[], T]]) -> list[Done[T | Standing]]:
        """The result of each answer's work; _NO_TURN if there was no time for it."""
        if not work:
            return []
        try:
            ran = self._thread.run(work, MAX_STEP_CPU_S)
        except NoThreadError as error:
            log.error("no grammar is followed", reason=str(error))
            return [Done(error, 0.0)] * len(work)
        done: list[Done[T | Standing]] = [
            Done(_report(answer, one.result), one.cpu_s) for answer, one in zip(answers, ran.done, strict=False)
        ]
        if ran.is_stuck:
            done.append(Done(_give_up(answers[len(done)]), MAX_STUCK_CPU_S))
        return done + [_NO_TURN] * (len(work) - len(done))


def _constrain(answer: _Bound, drafts: Seq[int]) -> NDArray[np.int32] | Standing:
    """[1 + drafts, ceil(V / 32)]: the tokens that may come next, and after each draft that the grammar allows.

    WHOLE if the answer is complete without a further token. Raises GrammarMismatchError.
    """
    until = thread_time() + MAX_TURN_CPU_S
    matcher = _find_matcher(answer)
    sequence = answer.sequence
    if not matcher.accept(sequence.tokens[sequence.answer_begin + matcher.num_tokens :], until):
        return Standing.LATE
    if matcher.is_over:
        return Standing.WHOLE
    masks = matcher.fill(drafts, until)
    if not masks[0].any():
        raise GrammarMismatchError("the grammar allows no token here, and not the end either")
    return masks


def _follow(answer: _Bound, tokens: Seq[int]) -> Standing:
    """Raises GrammarMismatchError."""
    until = thread_time() + MAX_TURN_CPU_S
    kept, reason = answer.sequence.keep(tokens)
    if reason == "stop":
        return Standing.OPEN
    matcher = _find_matcher(answer)
    if not matcher.accept(kept, until):
        return Standing.LATE
    return Standing.WHOLE if matcher.is_over else Standing.OPEN


def _find_matcher(answer: _Bound) -> Matcher:
    """The answer's matcher; at its first step here, one at the beginning. Raises GrammarMismatchError."""
    if answer.grammar.is_too_slow.is_set():
        raise _too_slow()
    if answer.matcher is None:
        answer.matcher = answer.grammar.new_matcher(answer.sequence.params.stop_token_ids)
    return answer.matcher


def _give_up(answer: _Bound) -> GrammarMismatchError:
    """End the answer, and all others with its grammar: each would cost a thread, as this one did."""
    answer.grammar.is_too_slow.set()
    log.warning("a grammar is given up: a single call takes too long", request_id=answer.sequence.params.request_id)
    return _too_slow()


def _too_slow() -> GrammarMismatchError:
    return GrammarMismatchError("the grammar takes too long for one token: it is too ambiguous")


def _report(answer: _Bound, result: T | Exception) -> T | Exception:
    """The same. An error that is not the client's is logged, and replaced by one without xgrammar's internals."""
    if not isinstance(result, Exception) or isinstance(result, GrammarMismatchError):
        return result
    log.error("a grammar was not followed", request_id=answer.sequence.params.request_id, exc_info=result)
    return GrammarFailedError(f"the grammar could not be followed: {type(result).__name__}")
