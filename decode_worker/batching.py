"""What the next engine step of a decode worker computes. Pure: a decision over sessions, no tensors."""

from dataclasses import dataclass

from decode_worker.session import Phase, Session
from decode_worker.session_table import SessionTable

MAX_SCORED = 128  # a step: a prompt token whose log-probabilities are told costs as much as one that is chosen


@dataclass(frozen=True, slots=True)
class Planned:
    """`count` positions of one session, from its `computed` on."""

    session: Session
    count: int
    num_scored: int  # so many prompt tokens, from the session's `scored` on, get their log-probabilities
    wants_token: bool  # the slice reaches the last token, so the step chooses the next one


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
