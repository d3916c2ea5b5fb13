"""All sessions of a decode worker and the pages they hold. Pure: ints, `now` passed in; the caller serialises calls.

The life of a session, and what frees its pages, is drawn in session.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from decode_worker.session import Delta, OfferRefusedError, Phase, Reservation, Session
from engine.kvcache.allocator import NeverFitsError, NoRoomError, PageAllocator, num_pages_for


@dataclass(slots=True)
class SessionTable:
    """All sessions of a worker, and the pages of its pool."""

    allocator: PageAllocator
    page_tokens: int
    max_running: int
    lease_s: float
    num_preemptions: int = 0
    on_empty: Callable[[], None] = lambda: None  # called when the last session is gone
    _sessions: dict[int, Session] = field(default_factory=dict)  # id |-> session, oldest first
    _by_handle: dict[tuple[str, int], int] = field(default_factory=dict)  # (gateway, handle) |-> id
    _next_id: int = 1

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))  # a copy: metrics read from another thread, loops end sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def in_phase(self, phase: Phase) -> list[Session]:
        """Sessions in `phase`, oldest first."""
        return [session for session in self if session.phase is phase]

    # -- reservation ---------------------------------------------------------------------------------------------

    def reserve(self, wanted: Reservation, now: float) -> Session:
        """Lease pages for the prompt. The same reservation again returns the same session."""
        key = (wanted.gateway, wanted.handle)
        if key in self._by_handle:
            return self._sessions[self._by_handle[key]]
        num_prompt = len(wanted.prompt_ids)
        pages = self.allocator.allocate(self._admit(num_prompt, wanted.max_tokens))
        is_local = num_prompt - 1 <= wanted.local_prefill_max_tokens
        session = Session(
            id=self._next_id,
            request_id=wanted.request_id,
            attempt=wanted.attempt,
            gateway=wanted.gateway,
            handle=wanted.handle,
            tokens=list(wanted.prompt_ids),
            num_prompt=num_prompt,
            max_total=num_prompt + wanted.max_tokens,
            sampling=wanted.sampling,
            stop_token_ids=wanted.stop_token_ids,
            pages=pages,
            phase=Phase.ACTIVE if is_local or num_prompt == 1 else Phase.RECEIVING,
            deadline=now + self.lease_s,
        )
        self._next_id += 1
        self._sessions[session.id] = session
        self._by_handle[key] = session.id
        return session

    def _admit(self, num_prompt: int, max_tokens: int) -> int:
        """Pages to lease now. Raises NeverFitsError or NoRoomError."""
        most = num_pages_for(num_prompt + max_tokens, self.page_tokens)
        if most > self.allocator.num_pages:
            raise NeverFitsError(
                f"prompt and answer of {num_prompt + max_tokens} tokens need {most} pages; "
                f"this worker has {self.allocator.num_pages}: raise --kv-memory-mib or lower max_tokens"
            )
        running = sum(session.phase is not Phase.ENDED for session in self)
        if running >= self.max_running:
            raise NoRoomError(f"{running} sessions are running, the most allowed by --max-running")
        pages = num_pages_for(num_prompt, self.page_tokens)
        spare = self.allocator.num_free - running  # each running session may soon need a page
        if self.in_phase(Phase.PREEMPTED) or (running and pages > spare):
            raise NoRoomError(f"{pages} pages are needed, {max(spare, 0)} are spare")
        if pages > self.allocator.num_free:
            raise NoRoomError(f"{pages} pages are needed, {self.allocator.num_free} are free")
        return pages

    # -- offers --------------------------------------------------------------------------------------------------

    def renew(self, session_id: int, attempt: int, now: float) -> None:
        """The prompt is still being computed: begin the lease anew. Raises OfferRefusedError."""
        self._find_receiving(session_id, attempt).deadline = now + self.lease_s

    def begin_read(self, session_id: int, attempt: int, begin: int, end: int, num_pages: int) -> list[int]:
        """Accept an offer of positions [begin, end): the pages to copy into, leased until `finish_read`.

        Offers of a session come in order, one at a time. Raises OfferRefusedError.
        """
        session = self._find_receiving(session_id, attempt)
        if session.is_read:
            raise OfferRefusedError("session", f"session {session_id} is reading another offer")
        limit = session.num_prompt - 1
        is_aligned = begin % self.page_tokens == 0 and (end % self.page_tokens == 0 or end == limit)
        if begin != session.computed or not begin < end <= limit or not is_aligned:
            raise OfferRefusedError(
                "bounds", f"offer of [{begin}, {end}) where [{session.computed}, {limit}) is wanted, page by page"
            )
        first = begin // self.page_tokens
        targets = session.pages[first : num_pages_for(end, self.page_tokens)]
        if len(targets) != num_pages:
            raise OfferRefusedError("bounds", f"{num_pages} pages offered for [{begin}, {end}), not {len(targets)}")
        session.is_read = True
        return targets

    def _find_receiving(self, session_id: int, attempt: int) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.phase is Phase.ENDED:
            raise OfferRefusedError("session", f"session {session_id} is not open here")
        if session.attempt != attempt:
            raise OfferRefusedError("attempt", f"offer of attempt {attempt}; session {session_id} is {session.attempt}")
        if session.phase is not Phase.RECEIVING:
            raise OfferRefusedError("session", f"session {session_id} takes no offer now ({session.phase.value})")
        return session

    def finish_read(self, session_id: int, end: int, now: float) -> None:
        """The copy of an accepted offer is over and checked: KV up to `end` is here."""
        session = self._sessions[session_id]
        session.is_read = False
        if session.phase is Phase.RECEIVING:
            session.computed = end
            session.deadline = now + self.lease_s
            if end == session.num_prompt - 1:
                session.phase = Phase.ACTIVE
        self._remove_if_over(session)

    def fail_read(self, session_id: int) -> None:
        """The copy of an accepted offer failed: what it wrote is not believed, and may be offered again."""
        session = self._sessions[session_id]
        session.is_read = False
        self._remove_if_over(session)

    # -- steps ---------------------------------------------------------------------------------------------------

    def resume_preempted(self) -> None:
        """Give pages back to preempted sessions, oldest first, while all they need is free."""
        for session in self.in_phase(Phase.PREEMPTED):
            needed = num_pages_for(len(session.tokens), self.page_tokens)
            if needed > self.allocator.num_free:
                return
            session.pages = self.allocator.allocate(needed)
            session.phase = Phase.ACTIVE

    def make_room(self, session: Session, num_tokens: int) -> bool:
        """Extend an active session's pages to `num_tokens` positions, preempting the newest active ones if it must.

        False when there is no room in this step: the session itself was the newest and got preempted, or it is the
        only active one and waits for pages that receiving sessions hold.
        """
        needed = num_pages_for(num_tokens, self.page_tokens) - len(session.pages)
        while needed > self.allocator.num_free:
            active = self.in_phase(Phase.ACTIVE)
            if active == [session]:
                return False
            self._preempt(active[-1])
            if active[-1] is session:
                return False
        session.pages.extend(self.allocator.allocate(max(needed, 0)))
        return True

    def _preempt(self, session: Session) -> None:
        self.allocator.free(session.pages)
        session.pages = []
        session.computed = 0
        session.phase = Phase.PREEMPTED
        self.num_preemptions += 1

    def begin_step(self, sessions: Iterable[Session]) -> None:
        """An engine step will work on these sessions' pages: they stay leased until `finish_step` or `fail_step`."""
        for session in sessions:
            session.is_stepped = True

    def finish_step(self, session: Session, count: int, token: int | None) -> Delta | None:
        """A step computed `count` more positions and perhaps chose the next token. Returns news, if any."""
        session.is_stepped = False
        if session.phase is Phase.ENDED:
            self._remove_if_over(session)
            return None
        session.computed += count
        if token is None:
            return None
        session.tokens.append(token)
        reason = ""
        if token in session.stop_token_ids:
            reason = "stop"
        elif len(session.tokens) == session.max_total:
            reason = "length"
        delta = Delta(session.gateway, session.handle, session.attempt, (token,), reason)
        if reason:
            self._end(session)
        return delta

    # -- ends ----------------------------------------------------------------------------------------------------

    def fail(self, session: Session, error: str, reason: str = "error") -> Delta:
        """End a session for `error`, after its step if it is in one."""
        session.is_stepped = False
        self._end(session)
        return Delta(session.gateway, session.handle, session.attempt, (), reason, error)

    def abort(self, gateway: str, handles: Iterable[int]) -> list[Session]:
        """End these sessions of `gateway`; unknown handles are left alone. Returns the sessions ended."""
        wanted = set(handles)
        return self._abort_where(lambda session: session.gateway == gateway and session.handle in wanted)

    def abort_gateway(self, gateway: str) -> list[Session]:
        """End all sessions of a gateway that listens no more. Returns them."""
        return self._abort_where(lambda session: session.gateway == gateway)

    def _abort_where(self, is_wanted: Callable[[Session], bool]) -> list[Session]:
        ended = [session for session in self if session.phase is not Phase.ENDED and is_wanted(session)]
        for session in ended:
            self._end(session)
        return ended

    def expire(self, now: float) -> list[Delta]:
        """End sessions whose KV did not arrive within the lease."""
        late = [session for session in self.in_phase(Phase.RECEIVING) if session.deadline <= now]
        error = f"no KV arrived within the lease of {self.lease_s:g} s (--lease-s)"
        return [self.fail(session, error, "expired") for session in late]

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to do."""
        return min((session.deadline for session in self.in_phase(Phase.RECEIVING)), default=None)

    def _end(self, session: Session) -> None:
        session.phase = Phase.ENDED
        self._remove_if_over(session)

    def _remove_if_over(self, session: Session) -> None:
        if session.phase is Phase.ENDED and not session.is_read and not session.is_stepped:
            self.allocator.free(session.pages)
            del self._sessions[session.id]
            del self._by_handle[session.gateway, session.handle]
            if not self._sessions:
                self.on_empty()

    def check(self) -> None:
        """No page has two holders, none is held by nobody, and KV counts fit the pages."""
        self.allocator.check()
        held = [page for session in self for page in session.pages]
        if len(held) != len(set(held)):
            raise AssertionError("a page belongs to two sessions")
        if len(held) != self.allocator.num_used:
            raise AssertionError(f"{self.allocator.num_used} pages are held, sessions know of {len(held)}")
        for session in self:
            if session.computed > len(session.pages) * self.page_tokens:
                raise AssertionError(f"session {session.id} has KV beyond its pages")
            if session.phase is Phase.ACTIVE and session.num_missing < 1:
                raise AssertionError(f"active session {session.id} has no token left to step on")
