"""Sessions with one prompt (parallel sampling, n > 1): one computes its KV, the others hold the same pages. Pure.

Who waits for whom, and copy-on-write: the page that the prompt fills only in part is copied before a sharer writes.
Drawn in session.py. Called by SessionTable alone, which owns the sessions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from decode_worker.session import NothingToShareError, Phase, Reservation, Session
from engine.kvcache.allocator import PageAllocator


def find_leader(wanted: Reservation, named: Session | None, sessions: Mapping[int, Session]) -> Session:
    """Who has, or will have, the KV that `wanted` is to share. Raises NothingToShareError.

    `named`: the session that it names, if there is one; while that waits for a leader, it is the same one.
    """
    leader = sessions.get(named.leader_id) if named is not None and named.phase is Phase.SHARING else named
    if leader is None or leader.phase is Phase.ENDED:
        raise NothingToShareError(f"share_with is {wanted.share_with}, which is no open session of this gateway")
    if list(leader.wanted.prompt_ids) != list(wanted.prompt_ids):
        raise NothingToShareError(f"share_with is {wanted.share_with}, a session with another prompt")
    return leader


def find_sharers(leader: Session, sessions: Iterable[Session]) -> list[Session]:
    """Sessions that wait for the leader's KV, in the order given."""
    return [session for session in sessions if session.phase is Phase.SHARING and session.leader_id == leader.id]


def find_orphans(sessions: Mapping[int, Session]) -> list[Session]:
    """Sessions that wait for one that has ended. A sharer has no deadline of its own: its leader's is its."""
    return [
        session
        for session in sessions.values()
        if session.phase is Phase.SHARING and not _is_open(sessions.get(session.leader_id))
    ]


def _is_open(session: Session | None) -> bool:
    return session is not None and session.phase is not Phase.ENDED


def take_over(session: Session, leader: Session, allocator: PageAllocator, page_tokens: int, now: float) -> None:
    """Share the leader's pages that the prompt fills, and have the rest copied into a page of the session's own.

    Without a free page for that the session is computed by itself, when there is room.
    """
    if not allocator.num_free:
        session.phase = Phase.PREEMPTED
        return
    whole = session.limit // page_tokens
    session.pages = leader.pages[:whole]
    if session.limit % page_tokens:
        source = leader.copy[0] if leader.copy else leader.pages[whole]  # perhaps not copied there itself yet
        allocator.share([*session.pages, source])
        session.pages += allocator.allocate(1)
        session.copy = (source, session.pages[whole])
    else:
        allocator.share(session.pages)
        session.pages += allocator.allocate(1)
    session.computed = session.limit
    session.draft_computed = min(leader.draft_computed, session.limit)
    session.kv_at = now
    session.phase = Phase.ACTIVE


def finish_copy(session: Session, allocator: PageAllocator) -> None:
    """A step of the session is over, and with it the copy before that, if there was one: let go of its source."""
    if session.copy is not None:
        allocator.free([session.copy[0]])
        session.copy = None


def check_sharing(sessions: Mapping[int, Session], page_tokens: int) -> None:
    """What is written to has one user, and nobody waits for KV that is there."""
    users = Counter(page for session in sessions.values() for page in session.pages)
    for session in sessions.values():
        if any(users[page] > 1 for page in session.pages[session.computed // page_tokens :]):
            raise AssertionError(f"session {session.id} may write to a page that another one uses")
        leader = sessions.get(session.leader_id)
        if session.phase is Phase.SHARING and leader and leader.computed >= session.limit > 0:
            raise AssertionError(f"session {session.id} waits for KV that session {leader.id} has")
