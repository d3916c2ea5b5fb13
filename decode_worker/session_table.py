"""All sessions of a decode worker and the pages they hold. Pure: ints, `now` passed in; the caller serialises calls.

The life of a session, and what frees its pages, is drawn in session.py; who shares whose pages: prompt_sharing.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from decode_worker.prompt_sharing import check_sharing, find_leader, find_orphans, find_sharers, finish_copy, take_over
from decode_worker.session import NO_GUESSES, Delta, Guessed, OfferRefusedError, Phase, Reservation, Session
from engine.choice import TokenLogprobs
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

    def in_phase(self, *phases: Phase) -> list[Session]:
        """Sessions in one of `phases`, oldest first."""
        return [session for session in self if session.phase in phases]

    # -- reservation ---------------------------------------------------------------------------------------------

    def reserve(self, wanted: Reservation, now: float) -> Session:
        """Lease pages for the prompt, or wait for those to share. The same reservation again returns the same session.

        Raises NothingToShareError, NeverFitsError or NoRoomError.
        """
        key = (wanted.gateway, wanted.handle)
        if key in self._by_handle:
            return self._sessions[self._by_handle[key]]
        num_prompt = len(wanted.prompt_ids)
        leader = self._find_leader(wanted) if wanted.share_with else None
        needed = 1 if leader else num_pages_for(num_prompt, self.page_tokens)  # the page of the first step at least
        self._admit(num_prompt + wanted.max_tokens, needed)
        is_here = num_prompt - 1 <= wanted.local_prefill_max_tokens
        session = Session(
            id=self._next_id,
            wanted=wanted,
            phase=Phase.SHARING if leader else Phase.ACTIVE if is_here else Phase.RECEIVING,
            tokens=list(wanted.prompt_ids),
            pages=[] if leader else self.allocator.allocate(needed),
            reserved_at=now,
            deadline=now + self.lease_s,
            scored=1 if is_here and wanted.num_prompt_logprobs is not None else num_prompt,
            kv_at=now if num_prompt == 1 else None,
        )
        self._next_id += 1
        self._sessions[session.id] = session
        self._by_handle[key] = session.id
        if leader:
            session.leader_id = leader.id
            if leader.computed >= session.limit:
                take_over(session, leader, self.allocator, self.page_tokens, now)
        return session

    def _find_leader(self, wanted: Reservation) -> Session:
        named = self._sessions.get(self._by_handle.get((wanted.gateway, wanted.share_with), 0))
        return find_leader(wanted, named, self._sessions)

    def _admit(self, most_tokens: int, needed: int) -> None:
        """Whether to take a session that needs so many pages now. Raises NeverFitsError or NoRoomError."""
        most = num_pages_for(most_tokens, self.page_tokens)
        if most > self.allocator.num_pages:
            raise NeverFitsError(
                f"prompt and answer of {most_tokens} tokens need {most} pages; "
                f"this worker has {self.allocator.num_pages}: raise --kv-memory-mib or lower max_tokens"
            )
        running = sum(session.phase is not Phase.ENDED for session in self)
        if running >= self.max_running:
            raise NoRoomError(f"{running} sessions are running, the most allowed by --max-running")
        spare = self.allocator.num_free - running  # each running session may soon need a page
        if self.in_phase(Phase.PREEMPTED) or (running and needed > spare):
            raise NoRoomError(f"{needed} pages are needed, {max(spare, 0)} are spare")
        if needed > self.allocator.num_free:
            raise NoRoomError(f"{needed} pages are needed, {self.allocator.num_free} are free")

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
        limit = session.limit
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
            session.deadline = now + self.lease_s
            session.draft_computed = end  # pages hold both models' KV
            if end == session.limit:
                session.phase = Phase.ACTIVE
            self._advance(session, end, now)
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
        self._release(session)
        session.computed = session.draft_computed = 0
        session.phase = Phase.PREEMPTED
        session.num_preemptions += 1
        self.num_preemptions += 1

    def make_room_for_guesses(self, session: Session, count: int) -> int:
        """Extend an active session's pages by `count` positions beyond its tokens, or by what is to spare.

        Guesses take no page that another session may need in this step. Returns for how many there is room.
        """
        room = len(session.pages) * self.page_tokens - len(session.tokens)
        while room < count and self.allocator.num_free > len(self._sessions):
            session.pages += self.allocator.allocate(1)
            room += self.page_tokens
        return max(min(count, room), 0)

    def begin_step(self, sessions: Iterable[Session]) -> None:
        """An engine step will work on these sessions' pages: they stay leased until `finish_step` or `fail_step`."""
        for session in sessions:
            session.is_stepped = True

    def finish_step(
        self,
        session: Session,
        count: int,
        tokens: Sequence[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        guessed: Guessed = NO_GUESSES,
        is_whole: bool = False,
    ) -> Delta | None:
        """A step computed `count` more positions and perhaps chose `tokens`, the next ones. Returns news, if any.

        Of several tokens all but the last were computed in this step as well. Those beyond the answer's end are
        dropped. `logprobs`: one a token, or none; `prompt_logprobs`: of the next prompt tokens not told yet;
        `guessed`: how the guesses among the tokens came about, those that were wrong included; `is_whole`: with these
        tokens nothing more may come.
        """
        session.is_stepped = False
        if session.phase is Phase.ENDED:
            self._remove_if_over(session)
            return None
        finish_copy(session, self.allocator)
        kept, reason = session.keep(tokens)
        reason = "stop" if is_whole else reason
        session.tokens.extend(kept)
        session.scored += len(prompt_logprobs)
        if guessed.draft_computed is not None:
            session.draft_computed = min(guessed.draft_computed, len(session.tokens) - 1)
        if tokens:
            session.acceptance = session.acceptance.after(guessed.tried, len(tokens) - 1)
            session.num_drafted += guessed.drafted
            session.num_accepted += min(len(kept), len(tokens) - 1)
        self._advance(session, min(session.computed + count, len(session.tokens) - 1), now)
        if kept:
            session.num_steps += 1
            session.last_token_at = now
            if session.first_token_at is None:
                session.first_token_at = now
        elif not prompt_logprobs:
            return None
        delta = Delta(
            session.gateway, session.handle, session.attempt, tuple(kept), reason,
            logprobs=tuple(logprobs[: len(kept)]), prompt_logprobs=tuple(prompt_logprobs),
            timing=session.timing(now) if reason else None,
        )  # fmt: skip
        if reason:
            self._end(session)
        return delta

    def _advance(self, session: Session, computed: int, now: float) -> None:
        """KV of positions [0, computed) is in the session's pages; once that is the prompt's, others take it over."""
        is_complete = session.computed < session.limit <= computed
        session.computed = computed
        if is_complete:
            if session.kv_at is None:
                session.kv_at = now
            for sharer in find_sharers(session, self):
                take_over(sharer, session, self.allocator, self.page_tokens, now)

    # -- ends ----------------------------------------------------------------------------------------------------

    def fail(self, session: Session, error: str, now: float, reason: str = "error") -> Delta:
        """End a session for `error`, or by any other `reason`, after its step if it is in one."""
        session.is_stepped = False
        self._end(session)
        return Delta(
            session.gateway, session.handle, session.attempt, (), reason, error, timing=session.timing(now)
        )  # fmt: skip

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
        """End sessions whose KV did not arrive within the lease, and those that wait for KV of one that ended."""
        error = f"no KV arrived within the lease of {self.lease_s:g} s (--lease-s)"
        late = [session for session in self._find_leased() if session.deadline <= now]
        news = [self.fail(session, error, now, "expired") for session in late]
        error = "the session whose prompt it shares ended before its KV was here"
        return news + [self.fail(session, error, now, "expired") for session in find_orphans(self._sessions)]

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to do."""
        if find_orphans(self._sessions):
            return float("-inf")
        return min((session.deadline for session in self._find_leased()), default=None)

    def _find_leased(self) -> list[Session]:
        """Sessions that wait for the next offer; a read has a bound of its own."""
        return [session for session in self.in_phase(Phase.RECEIVING) if not session.is_read]

    def _end(self, session: Session) -> None:
        session.phase = Phase.ENDED
        self._remove_if_over(session)

    def _remove_if_over(self, session: Session) -> None:
        if session.phase is Phase.ENDED and not session.is_read and not session.is_stepped:
            self._release(session)
            del self._sessions[session.id]
            del self._by_handle[session.gateway, session.handle]
            if not self._sessions:
                self.on_empty()

    def _release(self, session: Session) -> None:
        """Hold no page any more."""
        self.allocator.free(session.held_pages)
        session.pages, session.copy = [], None

    def check(self) -> None:
        """Each page counts as many holders as there are, what is written to has one, and KV counts fit the pages."""
        self.allocator.check(page for session in self for page in session.held_pages)
        check_sharing(self._sessions, self.page_tokens)
        for session in self:
            if max(session.computed, session.draft_computed) > len(session.pages) * self.page_tokens:
                raise AssertionError(f"session {session.id} has KV beyond its pages")
            if session.phase is Phase.ACTIVE and session.num_missing < 1:
                raise AssertionError(f"active session {session.id} has no token left to step on")
            if session.phase in (Phase.SHARING, Phase.PREEMPTED) and session.held_pages:
                raise AssertionError(f"session {session.id} is {session.phase.value} and holds pages")
