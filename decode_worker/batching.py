"""What the next engine step of a decode worker computes. Pure: a decision over sessions, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from decode_worker.session import NO_GUESSES, Guessed, Phase, Session
from decode_worker.session_table import SessionTable
from decode_worker.speculation.lengths import Candidate, Costs, choose_lengths

MAX_SCORED = 128  # a step: a prompt token whose log-probabilities are told costs as much as one that is chosen


@dataclass(frozen=True, slots=True)
class Planned:
    """`count` positions of one session, from its `computed` on."""

    session: Session
    count: int
    num_scored: int  # so many prompt tokens, from the session's `scored` on, get their log-probabilities
    wants_token: bool  # the slice reaches the last token, so the step chooses the next one
    num_guesses: int = 0  # so many tokens may be guessed ahead
    guesses: tuple[int, ...] = ()  # what was guessed; set by the speculator, as is `guessed`
    guessed: Guessed = NO_GUESSES
    masks: NDArray[np.int32] | None = None  # [1 + guesses, ceil(V / 32)]: what each choice is from; set by grammar


def plan_step(table: SessionTable, chunk_tokens: int) -> list[Planned]:
    """Every active session's next token, oldest first, and at most `chunk_tokens` positions of local prefill.

    Makes room page by page: sessions may be preempted (newest first) or resumed on the way. What is planned is in a
    step from now on (`begin_step`).
    """
    table.resume_preempted()
    planned = []
    budget, score_budget = chunk_tokens, MAX_SCORED
    for session in table.in_phase(Phase.ACTIVE):
        if session.phase is not Phase.ACTIVE:  # preempted for an older one just now
            continue
        missing = session.num_missing
        count = 1 if missing == 1 else min(missing, budget, session.num_until_scored(score_budget))
        if count and table.make_room(session, session.computed + count):
            num_scored = session.num_to_score(count)
            planned.append(Planned(session, count, num_scored, wants_token=count == missing))
            budget -= count if missing > 1 else 0
            score_budget -= num_scored
    table.begin_step(step.session for step in planned)
    return planned


def plan_guesses(table: SessionTable, planned: Sequence[Planned], costs: Costs) -> list[Planned]:
    """The same step with as many guesses ahead as are worth their cost, where pages are to spare for them."""
    plain = [step for step in planned if step.wants_token and step.count == 1]
    candidates = [
        Candidate(step.session.acceptance.rate, step.session.most_guesses, step.session.wanted.drafter == "ngram")
        for step in plain
    ]
    lengths = choose_lengths(candidates, sum(step.count for step in planned) - len(plain), costs)
    counts = {
        step.session.id: table.make_room_for_guesses(step.session, length)
        for step, length in zip(plain, lengths, strict=True)
    }
    return [replace(step, num_guesses=counts.get(step.session.id, 0)) for step in planned]
