"""Keeps answers to their grammars within the step's time: masks before a step, its tokens followed after it.

Runs on the engine thread. xgrammar is called on another (step_thread.py), so that no call blocks the engine for long.
Each answer is a call of its own, not one batch: so its time is known, and one that takes too long ends alone.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from time import monotonic, thread_time
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import structlog
from numpy.typing import NDArray

from decode_worker.grammar.errors import GrammarFailedError, GrammarMismatchError
from decode_worker.grammar.limits import (
    BESIDE_SHARE,
    CHEAP_CPU_S,
    MAX_ANSWER_CPU_S,
    MAX_STEP_CPU_S,
    MAX_TURN_CPU_S,
    UNKNOWN_CPU_S,
    Allowance,
)
from decode_worker.grammar.matcher import LoadedGrammar, Matcher
from decode_worker.grammar.step_thread import NoThreadError, StepThread, StuckError, TurnEnd
from decode_worker.interfaces import Masks, Standing
from worker.sequences import ScheduledSequence, Sequence

T = TypeVar("T")
log = structlog.get_logger()

WARN_S = 10.0  # between two warnings


_NO_TURN: TurnEnd[Any] = TurnEnd(Standing.LATE, 0.0)


@dataclass(slots=True)
class _State:
    """How far an answer has come. Does not hold the sequence, with which it ends."""

    matcher: Matcher | None = None
    cpu_s: float = UNKNOWN_CPU_S  # of its last masks
    num_waited: int = 0  # steps since then that had no time for it
    beside_cpu_s: float = 0.0  # of all its masks beside others
    num_beside: int = 0  # such masks


_Filled: TypeAlias = tuple[NDArray[np.int32], list[int]]
_Work: TypeAlias = tuple[Sequence, Callable[[Sequence, _State], T]]


class Constraints(Masks):
    """Follows the grammars of a worker's answers step by step. An exception as a result ends its sequence."""

    def __init__(self) -> None:
        self._thread = StepThread()
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()
        self._allowance = Allowance()
        self._is_beside = False  # other answers, or ones with cheap grammars, are in the step
        self._warned_s = -WARN_S

    def concerns(self, step: ScheduledSequence) -> bool:
        return step.sequence.params.grammar is not None and step.wants_token

    def constrain(self, planned: Seq[ScheduledSequence]) -> list[Standing | Exception]:
        """Give the steps masks for the tokens they choose, and drop drafts that their grammars refuse.

        OPEN if the step can be computed; otherwise why not. Cheap answers come first, so that expensive ones do not
        delay them. Waiting makes an answer cheaper, so that each gets its turn.
        """
        standings: list[Standing | Exception] = [Standing.OPEN] * len(planned)
        mine = [(i, step, self._state(step.sequence)) for i, step in enumerate(planned) if self.concerns(step)]
        self._is_beside = len(mine) < len(planned) or any(state.cpu_s <= CHEAP_CPU_S for *_, state in mine)
        mine.sort(key=lambda one: one[2].cpu_s / (1 + one[2].num_waited))
        done = self._do([(step.sequence, partial(_constrain, step.drafts, step.parents)) for _, step, _ in mine])
        for (i, step, state), one in zip(mine, done, strict=True):
            if one is _NO_TURN:
                state.num_waited += 1
            else:
                state.cpu_s, state.num_waited = one.cpu_s, 0
            if isinstance(one.result, tuple) and (error := self._find_burden(step.sequence, state)) is not None:
                standings[i] = error
            elif isinstance(one.result, tuple):
                step.mask, good = one.result
                _keep(step, good)
            else:
                standings[i] = one.result
        return standings

    def _find_burden(self, sequence: Sequence, state: _State) -> GrammarMismatchError | None:
        """Counts its last masks. Returns why the answer must end, if it costs others too much."""
        state.beside_cpu_s += state.cpu_s if self._is_beside else 0.0
        state.num_beside += self._is_beside
        if state.beside_cpu_s <= max(MAX_ANSWER_CPU_S, MAX_TURN_CPU_S * state.num_beside):
            return None
        mean_ms = 1e3 * state.beside_cpu_s / state.num_beside
        log.warning("an answer is ended", reason="its grammar costs others much", request_id=sequence.params.request_id)
        message = f"the grammar takes {mean_ms:.0f} ms for a token, for which other answers wait: it is too ambiguous"
        return GrammarMismatchError(message)

    def follow(self, chosen: Seq[tuple[Sequence, Seq[int]]]) -> list[Standing | Exception]:
        """`constrain` catches up with an answer that is late."""
        return [one.result for one in self._do([(sequence, partial(_follow, tokens)) for sequence, tokens in chosen])]

    def _state(self, sequence: Sequence) -> _State:
        return self._states.setdefault(sequence, _State())

    def _do(self, work: Seq[_Work[T]]) -> list[TurnEnd[T | Standing]]:
        """The result of each answer's work; _NO_TURN if there was no time for it, as for costly ones beside others."""
        costly = [self._is_beside and self._state(sequence).cpu_s > CHEAP_CPU_S for sequence, _ in work]
        if not any(costly):
            return self._run(work, MAX_STEP_CPU_S)
        cheap, dear = ([one for one, is_dear in zip(work, costly, strict=True) if is_dear == kind] for kind in (0, 1))
        cheap_done, left_s = iter(self._run(cheap, MAX_STEP_CPU_S)), self._allowance.look(monotonic())
        found: list[TurnEnd[T | Standing]] = [_NO_TURN] * len(dear)
        if left_s > 0:
            found = self._run(dear, left_s)
            self._allowance.take(sum([one.cpu_s for one in found]))
        else:
            self._warn(dear[0][0])
        dear_done = iter(found)
        return [next(dear_done if is_dear else cheap_done) for is_dear in costly]

    def _run(self, work: Seq[_Work[T]], cpu_s: float) -> list[TurnEnd[T | Standing]]:
        if not work:
            return []
        calls = [partial(call, sequence, self._state(sequence)) for sequence, call in work]
        try:
            ran = self._thread.run(calls, cpu_s)
        except NoThreadError as error:
            log.error("no grammar is followed", reason=str(error))
            return [TurnEnd(error, 0.0) for _ in work]
        done: list[TurnEnd[T | Standing]] = [
            TurnEnd(_report(sequence, one.result), one.cpu_s) for (sequence, _), one in zip(work, ran, strict=False)
        ]
        return done + [_NO_TURN] * (len(work) - len(done))

    def _warn(self, sequence: Sequence) -> None:
        now = monotonic()
        if now - self._warned_s >= WARN_S:
            self._warned_s = now
            why = f"their grammars take more than {BESIDE_SHARE:.0%} of the time beside others"
            log.warning("answers are slowed", reason=why, request_id=sequence.params.request_id)


def _keep(step: ScheduledSequence, drafts: Seq[int]) -> None:
    """Some of its drafts alone, by index: with each, those before it on its path."""
    if step.parents:
        found = {0: 0} | {1 + index: number for number, index in enumerate(drafts, 1)}
        step.parents = [found[step.parents[index]] for index in drafts]
    step.drafts = [step.drafts[index] for index in drafts]


def _constrain(drafts: Seq[int], parents: Seq[int], sequence: Sequence, state: _State) -> _Filled | Standing:
    """[1 + drafts, ceil(V / 32)]: the tokens that may come next, and after each draft that the grammar allows; which
    drafts these are.

    WHOLE if the answer is complete without a further token. Raises GrammarMismatchError.
    """
    until = thread_time() + MAX_TURN_CPU_S
    matcher = _matcher(sequence, state)
    if not matcher.accept(sequence.tokens[sequence.answer_begin + matcher.num_tokens :], until):
        return Standing.LATE
    if matcher.is_over:
        return Standing.WHOLE
    found = matcher.fill_tree(drafts, parents, until)
    if not found[0][0].any():
        raise GrammarMismatchError("the grammar allows no token here, and not the end either")
    return found


def _follow(tokens: Seq[int], sequence: Sequence, state: _State) -> Standing:
    until = thread_time() + MAX_TURN_CPU_S
    kept, reason = sequence.keep(tokens)
    if reason == "stop":
        return Standing.OPEN
    matcher = _matcher(sequence, state)
    if not matcher.accept(kept, until):
        return Standing.LATE
    return Standing.WHOLE if matcher.is_over else Standing.OPEN


def _matcher(sequence: Sequence, state: _State) -> Matcher:
    """The answer's matcher; at its first step here, one at the beginning. Raises GrammarMismatchError."""
    grammar = _grammar(sequence)
    if grammar.is_too_slow:
        raise _too_slow()
    if state.matcher is None:
        state.matcher = grammar.new_matcher(sequence.params.stop_token_ids)
    return state.matcher


def _report(sequence: Sequence, result: T | Exception) -> T | Exception:
    """The result, or an error without xgrammar's internals in place of one that is not the client's.

    If the call was abandoned, all answers with its grammar end: each would cost a thread, as this one did.
    """
    if not isinstance(result, Exception) or isinstance(result, GrammarMismatchError):
        return result
    request_id = sequence.params.request_id
    if isinstance(result, StuckError):
        _grammar(sequence).is_too_slow = True
        log.warning("a grammar is given up: a single call takes too long", request_id=request_id)
        return _too_slow()
    log.error("a grammar was not followed", request_id=request_id, exc_info=result)
    return GrammarFailedError(f"the grammar could not be followed: {type(result).__name__}")


def _grammar(sequence: Sequence) -> LoadedGrammar:
    assert isinstance(sequence.params.grammar, LoadedGrammar)
    return sequence.params.grammar


def _too_slow() -> GrammarMismatchError:
    return GrammarMismatchError("the grammar takes too long for one token: it is too ambiguous")
