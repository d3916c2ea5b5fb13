"""Keeps answers to their grammars: masks before a step, the way of its tokens after it. Lives on the engine thread."""

from collections.abc import Sequence
from dataclasses import replace

from decode_worker.batching import Planned
from decode_worker.grammar.errors import GrammarMismatchError
from decode_worker.grammar.matcher import Matcher
from decode_worker.session import Session


def find_matcher(session: Session) -> Matcher | None:
    """How far the answer has come in its grammar, what earlier attempts emitted included; None without a grammar.

    Raises GrammarMismatchError when what they emitted does not fit.
    """
    grammar = session.wanted.grammar
    if session.matcher is None and grammar is not None:
        matcher = grammar.new_matcher(session.wanted.stop_token_ids)
        matcher.accept(session.tokens[session.answer_begin :])
        session.matcher = matcher
    return session.matcher


def constrain(step: Planned) -> Planned | None:
    """The step with masks for the tokens it chooses, and without guesses that the grammar refuses.

    None when the answer is whole without a further token. Raises GrammarMismatchError.
    """
    matcher = find_matcher(step.session) if step.wants_token else None
    if matcher is None:
        return step
    if matcher.is_over:
        return None
    masks = matcher.fill(step.guesses)
    if not masks[0].any():
        raise GrammarMismatchError("the grammar allows no token here, and not the end either")
    return replace(step, guesses=step.guesses[: len(masks) - 1], masks=masks)


def follow(session: Session, tokens: Sequence[int]) -> bool:
    """The answer goes on with these. Whether it is whole with them, by its grammar. Raises GrammarMismatchError."""
    if session.matcher is None:
        return False
    kept, reason = session.keep(tokens)
    if reason == "stop":
        return False
    session.matcher.accept(kept)
    return session.matcher.is_over
