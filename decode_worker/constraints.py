"""Keeps answers to their grammars: masks before a step, the way of its tokens after it, all within the step's time.

Lives on the engine thread; the work itself is done by a helper, which nothing can hold up for long.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from time import thread_time
from typing import Any, TypeVar

import structlog

from decode_worker.batching import Planned
from decode_worker.grammar.errors import GrammarFailedError, GrammarMismatchError
from decode_worker.grammar.helper import Done, Helper, NoHelperError
from decode_worker.grammar.limits import MAX_STEP_CPU_S, MAX_STUCK_CPU_S, MAX_TURN_CPU_S
from decode_worker.grammar.matcher import Matcher
from decode_worker.grammar.turns import Turns
from decode_worker.session import Session

T = TypeVar("T")
log = structlog.get_logger()


class Standing(Enum):
    """How an answer stands with its grammar."""

    OPEN = "it may go on"
    WHOLE = "it is whole as it is"
    LATE = "there was no time: it goes on in a later step"


_NO_TURN: Done[Any] = Done(Standing.LATE, 0.0)


class Constraints:
    """The grammars of a worker's answers, step by step. An exception as an outcome is the end of its session."""

    def __init__(self) -> None:
        self._helper = Helper()
        self._turns = Turns()

    def constrain(self, planned: Sequence[Planned]) -> list[Planned | Standing | Exception]:
        """Each step with masks for the tokens it chooses, and without guesses that its grammar refuses; or why not."""
        outcomes: dict[int, Planned | Standing | Exception] = {step.session.id: step for step in planned}
        bound = {step.session.id: step for step in planned if step.wants_token and step.session.wanted.grammar}
        order = self._turns.order(list(bound))
        done = self._do([bound[number].session for number in order], [partial(_constrain, bound[n]) for n in order])
        for number, one in zip(order, done, strict=True):
            outcomes[number] = one.result
            if one is _NO_TURN:
                self._turns.waited(number)
            else:
                self._turns.took(number, one.cpu_s)
        return [outcomes[step.session.id] for step in planned]

    def follow(self, chosen: Sequence[tuple[Session, Sequence[int]]]) -> list[Standing | Exception]:
        """How each answer stands with its next tokens. With one that is late, `constrain` catches up."""
        outcomes: list[Standing | Exception] = [Standing.OPEN] * len(chosen)
        bound = [index for index, (session, _tokens) in enumerate(chosen) if session.matcher is not None]
        done = self._do([chosen[i][0] for i in bound], [partial(_follow, *chosen[i]) for i in bound])
        for index, one in zip(bound, done, strict=True):
            outcomes[index] = one.result
        return outcomes

    def _do(self, sessions: Sequence[Session], work: Sequence[Callable[[], T]]) -> list[Done[T | Standing]]:
        """What came of each session's work; _NO_TURN where there was no time for it."""
        if not work:
            return []
        try:
            ran = self._helper.run(work, MAX_STEP_CPU_S)
        except NoHelperError as error:
            log.error("no grammar is followed", reason=str(error))
            return [Done(error, 0.0)] * len(work)
        done: list[Done[T | Standing]] = [
            Done(_report(session, one.result), one.cpu_s) for session, one in zip(sessions, ran.done, strict=False)
        ]
        if ran.is_stuck:
            done.append(Done(_give_up(sessions[len(done)]), MAX_STUCK_CPU_S))
        return done + [_NO_TURN] * (len(work) - len(done))


def _constrain(step: Planned) -> Planned | Standing:
    """WHOLE when the answer is so without a further token. Raises GrammarMismatchError."""
    until = thread_time() + MAX_TURN_CPU_S
    session = step.session
    matcher = _find_matcher(session)
    if not matcher.accept(session.tokens[session.answer_begin + matcher.num_tokens :], until):
        return Standing.LATE
    if matcher.is_over:
        return Standing.WHOLE
    masks = matcher.fill(step.guesses, until)
    if not masks[0].any():
        raise GrammarMismatchError("the grammar allows no token here, and not the end either")
    return replace(step, guesses=step.guesses[: len(masks) - 1], masks=masks)


def _follow(session: Session, tokens: Sequence[int]) -> Standing:
    """Raises GrammarMismatchError."""
    until = thread_time() + MAX_TURN_CPU_S
    kept, reason = session.keep(tokens)
    if reason == "stop":
        return Standing.OPEN
    matcher = _find_matcher(session)
    if not matcher.accept(kept, until):
        return Standing.LATE
    return Standing.WHOLE if matcher.is_over else Standing.OPEN


def _find_matcher(session: Session) -> Matcher:
    """How far the answer has come in its grammar: before its first token here, nowhere. Raises GrammarMismatchError."""
    grammar = session.wanted.grammar
    assert grammar is not None
    if grammar.is_too_slow.is_set():
        raise _too_slow()
    if session.matcher is None:
        session.matcher = grammar.new_matcher(session.wanted.stop_token_ids)
    return session.matcher


def _give_up(session: Session) -> GrammarMismatchError:
    """End the session, and all others with its grammar: each would leave a thread behind, as this one did."""
    grammar = session.wanted.grammar
    assert grammar is not None
    grammar.is_too_slow.set()
    log.warning("a grammar is given up: a single call takes too long", request_id=session.request_id)
    return _too_slow()


def _too_slow() -> GrammarMismatchError:
    return GrammarMismatchError("the grammar takes too long for one token: it is too ambiguous")


def _report(session: Session, result: T | Exception) -> T | Exception:
    """The same. An error that is none of the client's is logged, and says nothing of xgrammar's insides."""
    if not isinstance(result, Exception) or isinstance(result, GrammarMismatchError):
        return result
    log.error("a grammar was not followed", request_id=session.request_id, exc_info=result)
    return GrammarFailedError(f"the grammar could not be followed: {type(result).__name__}")
