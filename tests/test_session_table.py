"""Sessions of a decode worker: random lives in pools too small for them, and the promise that all of them end.

The machine interleaves the two threads of a worker: a step is planned in one rule and finished in another, with offers,
copies, aborts and deadlines in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_worker.batching import MAX_SCORED, Planned, plan_step
from decode_worker.session import Delta, NothingToShareError, OfferRefusedError, Phase, Reservation, Session
from decode_worker.session_table import SessionTable
from engine.choice import TokenLogprobs
from engine.kvcache.allocator import NeverFitsError, NoRoomError, PageAllocator, num_pages_for
from engine.sampling import SamplingParams

LEASE_S = 10.0
NO_LIMIT = 2**32 - 1


def reservation(
    handle: int,
    num_prompt: int,
    max_tokens: int,
    gateway: str = "g",
    local: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
    **others: Any,
) -> Reservation:
    return Reservation(
        request_id=f"r{handle}",
        attempt=handle % 3 + 1,
        gateway=gateway,
        handle=handle,
        prompt_ids=list(range(num_prompt)),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
        stop_token_ids=stop_token_ids,
        local_prefill_max_tokens=local,
        **others,
    )


def next_token(session: Session) -> int:
    """The stand-in for a model: a token that names its own position."""
    return 1000 + len(session.tokens)


def build_table(num_pages: int, page_tokens: int, max_running: int = 8) -> tuple[SessionTable, list[int]]:
    generations = [0] * num_pages
    return SessionTable(PageAllocator(num_pages, generations), page_tokens, max_running, LEASE_S), generations


def finish(table: SessionTable, step: Sequence[Planned], now: float = 0.0) -> list[Delta]:
    news = [
        table.finish_step(
            planned.session, planned.count, [next_token(planned.session)] if planned.wants_token else [], now
        )
        for planned in step
    ]
    return [delta for delta in news if delta is not None]


@dataclass
class Memory:
    """What lies in the pages: at each place the tokens up to that position, as KV depends on all of them."""

    page_tokens: int
    places: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # (page, row) |-> tokens up to it

    def write(self, pages: Sequence[int], begin: int, tokens: Sequence[int], end: int) -> None:
        for position in range(begin, end):
            place = (pages[position // self.page_tokens], position % self.page_tokens)
            self.places[place] = tuple(tokens[: position + 1])

    def copy(self, source: int, target: int) -> None:
        for row in range(self.page_tokens):
            self.places[target, row] = self.places.get((source, row), ())

    def check(self, session: Session, end: int) -> None:
        """KV of positions [0, end) of a session is its own."""
        for position in range(end):
            place = (session.pages[position // self.page_tokens], position % self.page_tokens)
            assert self.places.get(place) == tuple(session.tokens[: position + 1]), (session, position)


def compute(memory: Memory, step: Planned, chosen: Sequence[int], num_drafts: int = 0) -> None:
    """What the engine does to the pages of a slice. Drafts that are not chosen are written as well."""
    session, begin = step.session, step.session.computed
    if session.copy is not None:
        memory.copy(*session.copy)
    memory.check(session, begin)
    written = [*session.tokens, *chosen[:-1], *[-1] * num_drafts]
    memory.write(session.pages, begin, written, begin + step.count + num_drafts)


@dataclass
class Story:
    """What a gateway has heard of one session."""

    wanted: Reservation
    session: Session
    heard: list[int]
    ending: str = ""  # finish_reason, or "aborted"


@dataclass(frozen=True)
class Reading:
    """A copy under way: nobody else may get these pages before it is over."""

    session: Session
    end: int
    targets: list[int]
    generations: list[int]


class SessionTableMachine(RuleBasedStateMachine):
    """Everything that gateways, prefill workers, the clock and the engine do to the table."""

    @initialize(num_pages=st.integers(4, 12), page_tokens=st.integers(1, 4), max_running=st.integers(2, 6))
    def create(self, num_pages: int, page_tokens: int, max_running: int) -> None:
        self.table, self.generations = build_table(num_pages, page_tokens, max_running)
        self.memory = Memory(page_tokens)
        self.now = 100.0
        self.stories: dict[int, Story] = {}  # handle |-> story
        self.readings: list[Reading] = []
        self.step: list[Planned] = []
        self.stepped_generations: list[list[int]] = []

    # -- gateways ------------------------------------------------------------------------------------------------

    @rule(
        num_prompt=st.integers(1, 14),
        max_tokens=st.integers(1, 10),
        gateway=st.sampled_from(["g", "g", "g", "h"]),
        local=st.sampled_from([0, 2, NO_LIMIT]),
        stop_after=st.none() | st.integers(1, 5),
    )
    def reserve(self, num_prompt: int, max_tokens: int, gateway: str, local: int, stop_after: int | None) -> None:
        table, handle = self.table, len(self.stories) + 1
        stops = frozenset() if stop_after is None else frozenset({1000 + num_prompt + stop_after - 1})
        wanted = reservation(handle, num_prompt, max_tokens, gateway, local, stops)
        wanted = replace(wanted, prompt_ids=[handle, *wanted.prompt_ids[1:]])
        is_idle = not list(table)
        try:
            session = table.reserve(wanted, self.now)
        except NeverFitsError:
            assert num_pages_for(num_prompt + max_tokens, table.page_tokens) > table.allocator.num_pages
            return
        except NoRoomError:
            assert not is_idle, "an idle worker takes whatever fits at all"
            return
        assert (session.phase is Phase.ACTIVE) == (num_prompt == 1 or num_prompt - 1 <= local)
        self.stories[handle] = Story(wanted, session, [])

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), max_tokens=st.integers(1, 6))
    def reserve_shared(self, data: st.DataObject, max_tokens: int) -> None:
        """Another answer to the same prompt."""
        handle = len(self.stories) + 1
        likely = [name for name, story in self.stories.items() if not story.ending] * 3
        leader = self.stories[data.draw(st.sampled_from([*likely, *self.stories]))]
        wanted = replace(
            leader.wanted, handle=handle, attempt=1, request_id=f"r{handle}", max_tokens=max_tokens,
            stop_token_ids=frozenset(), share_with=leader.wanted.handle,
        )  # fmt: skip
        num_held = self.table.allocator.num_used
        is_there = leader.session.computed >= leader.session.limit
        try:
            session = self.table.reserve(wanted, self.now)
        except NothingToShareError:
            assert leader.ending or leader.session.phase is Phase.SHARING, "who shares with an orphan is refused"
            return
        except NeverFitsError:
            return
        except NoRoomError:
            running = sum(session.phase is not Phase.ENDED for session in self.table)
            is_tight = self.table.allocator.num_free <= running
            assert running >= self.table.max_running or is_tight or self.table.in_phase(Phase.PREEMPTED)
            return
        assert not leader.ending
        assert session.phase is (Phase.ACTIVE if is_there else Phase.SHARING)
        assert self.table.allocator.num_used == num_held + is_there, "it takes the page of its first step and no other"
        self.stories[handle] = Story(wanted, session, [])

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def reserve_again(self, data: st.DataObject) -> None:
        story = self.stories[data.draw(st.sampled_from(sorted(self.stories)))]
        if not story.ending:
            assert self.table.reserve(story.wanted, self.now) is story.session

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(sorted(self.stories)), unique=True, max_size=2))
        self._note_aborted(self.table.abort("g", [*handles, 10_000]), {"g"}, set(handles))

    @precondition(lambda self: any(session.gateway == "h" for session in self.table))
    @rule()
    def lose_gateway(self) -> None:
        self._note_aborted(self.table.abort_gateway("h"), {"h"}, set(self.stories))

    def _note_aborted(self, ended: list[Session], gateways: set[str], handles: set[int]) -> None:
        expected = [
            story
            for handle, story in self.stories.items()
            if handle in handles and story.wanted.gateway in gateways and not story.ending
        ]
        assert sorted(session.handle for session in ended) == [story.wanted.handle for story in expected]
        for story in expected:
            story.ending = "aborted"

    # -- prefill workers -----------------------------------------------------------------------------------------

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        waiting = [session for session in self.table.in_phase(Phase.RECEIVING) if not session.is_read]
        if not waiting:
            return
        session = data.draw(st.sampled_from(waiting))
        begin, limit, page = session.computed, session.num_prompt - 1, self.table.page_tokens
        borders = [*range(begin + page, limit, page), limit]
        end = data.draw(st.sampled_from(borders))
        targets = self.table.begin_read(session.id, session.attempt, begin, end, num_pages_for(end - begin, page))
        assert set(targets) <= set(session.pages)
        self.readings.append(Reading(session, end, targets, [self.generations[target] for target in targets]))

    @precondition(lambda self: self.table.in_phase(Phase.RECEIVING))
    @rule()
    def hand_over(self) -> None:
        """All KV of the oldest prompt that waits for some, in one offer."""
        waiting = [session for session in self.table.in_phase(Phase.RECEIVING) if not session.is_read]
        for session in waiting[:1]:
            begin, end, page = session.computed, session.limit, self.table.page_tokens
            self.table.begin_read(session.id, session.attempt, begin, end, num_pages_for(end - begin, page))
            self.memory.write(session.pages, begin, session.tokens, end)
            self.table.finish_read(session.id, end, self.now)

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def offer_what_is_not_wanted(self, data: st.DataObject) -> None:
        session = self.stories[data.draw(st.sampled_from(sorted(self.stories)))].session
        begin, limit, page = session.computed, session.num_prompt - 1, self.table.page_tokens
        count = num_pages_for(limit - begin, page)
        right = {"session_id": session.id, "attempt": session.attempt, "begin": begin, "end": limit, "num_pages": count}
        wrong = data.draw(
            st.sampled_from(
                [
                    {"session_id": 10_000},
                    {"attempt": session.attempt + 1},
                    {"begin": begin + page},
                    {"end": limit + 1},
                    {"end": begin},
                    {"num_pages": count + 1},
                ]
            )
        )
        with pytest.raises(OfferRefusedError) as refusal:
            self.table.begin_read(**{**right, **wrong})
        if session in self.table.in_phase(Phase.RECEIVING) and not session.is_read:
            expected = {"session_id": "session", "attempt": "attempt"}.get(next(iter(wrong)), "bounds")
            assert refusal.value.reason == expected

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        session = self.stories[data.draw(st.sampled_from(sorted(self.stories)))].session
        if session in self.table.in_phase(Phase.RECEIVING):
            self.table.renew(session.id, session.attempt, self.now)
            assert session.deadline == self.now + LEASE_S
        else:
            with pytest.raises(OfferRefusedError):
                self.table.renew(session.id, session.attempt, self.now)

    @precondition(lambda self: self.readings)
    @rule(data=st.data(), is_good=st.booleans())
    def end_read(self, data: st.DataObject, is_good: bool) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        self.readings.remove(reading)
        if is_good:
            begin = reading.session.computed
            if reading.session.phase is Phase.RECEIVING:
                self.memory.write(reading.session.pages, begin, reading.session.tokens, reading.end)
            self.table.finish_read(reading.session.id, reading.end, self.now)
        else:
            self.table.fail_read(reading.session.id)

    # -- the clock -----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 6.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.table.next_deadline()
        expired = self.table.expire(self.now)
        assert bool(expired) == (deadline is not None and deadline <= self.now)
        self._hear(expired)
        later = self.table.next_deadline()
        assert later is None or later > self.now

    # -- the engine ----------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.step)
    @rule(chunk=st.integers(1, 6))
    def plan(self, chunk: int) -> None:
        self.step = plan_step(self.table, chunk)
        self.stepped_generations = [[self.generations[p] for p in step.session.pages] for step in self.step]
        assert sum(step.count for step in self.step if not (step.count == 1 and step.wants_token)) <= chunk
        active = self.table.in_phase(Phase.ACTIVE)
        others_hold_pages = any(session.phase in (Phase.RECEIVING, Phase.ENDED) for session in self.table)
        orphans = [session for session in self.table.in_phase(Phase.SHARING) if self.table.next_deadline() is not None]
        if active and not others_hold_pages:
            assert self.step and self.step[0].session is active[0], "the oldest active session makes progress"
        if not active and not others_hold_pages:
            assert list(self.table) == orphans, "a preempted session resumes once it is alone"
        for step in self.step:
            session = step.session
            assert session.phase is Phase.ACTIVE and session.is_stepped
            assert len(session.pages) >= num_pages_for(session.computed + step.count, self.table.page_tokens)

    @precondition(lambda self: self.step)
    @rule(is_failed=st.booleans(), num_drafts=st.integers(0, 3), num_right=st.integers(0, 3))
    def end_step(self, is_failed: bool, num_drafts: int, num_right: int) -> None:
        """Slices that choose also compute drafts, as far as their pages reach; some of those are right."""
        aborted = {step.session.handle for step in self.step if step.session.phase is Phase.ENDED}
        news: list[Delta | None] = []
        for step in self.step:
            session = step.session
            room = len(session.pages) * self.table.page_tokens - session.computed - step.count
            drafts = min(num_drafts, room) if step.wants_token else 0
            chosen = [1000 + len(session.tokens) + at for at in range(min(num_right, drafts) + step.wants_token)]
            compute(self.memory, step, chosen, drafts)
            if is_failed:
                news.append(self.table.fail(session, "no luck", self.now))
            else:
                news.append(self.table.finish_step(session, step.count + drafts, chosen, self.now))
        self._hear([delta for delta in news if delta is not None and delta.handle not in aborted])
        self.step, self.stepped_generations = [], []

    @precondition(lambda self: not self.step)
    @rule(num_steps=st.integers(1, 8), chunk=st.integers(1, 6))
    def run(self, num_steps: int, chunk: int) -> None:
        """Some steps in peace: lives get long enough for pages to run out."""
        for _ in range(num_steps):
            self.plan(chunk)
            self.end_step(is_failed=False, num_drafts=0, num_right=0)
            self.is_sound()

    def _hear(self, news: list[Delta]) -> None:
        """Each token once, in order, nothing after the end, and the end where it belongs."""
        for delta in news:
            story = self.stories[delta.handle]
            wanted = story.wanted
            assert not story.ending, "news after the end"
            assert (delta.gateway, delta.attempt) == (wanted.gateway, wanted.attempt)
            story.heard.extend(delta.token_ids)
            story.ending = delta.finish_reason
            first = 1000 + len(wanted.prompt_ids)
            assert story.heard == list(range(first, first + len(story.heard)))
            has_stopped = bool(story.heard) and story.heard[-1] in wanted.stop_token_ids
            is_full = len(story.heard) == wanted.max_tokens
            assert len(story.heard) <= wanted.max_tokens
            assert (delta.timing is not None) == bool(story.ending)
            if story.ending not in ("error", "expired"):
                assert story.ending == ("stop" if has_stopped else "length" if is_full else "")

    # -- always --------------------------------------------------------------------------------------------------

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        table.check()
        for session in table:
            if session.copy is None:
                self.memory.check(session, session.computed)
        for reading in self.readings:
            assert reading.session in list(table), "a session went while its pages were written to"
            assert [self.generations[page] for page in reading.targets] == reading.generations
        for step, generations in zip(self.step, self.stepped_generations, strict=True):
            assert step.session in list(table), "a session went in the middle of its step"
            assert [self.generations[page] for page in step.session.pages] == generations
        open_handles = {story.wanted.handle for story in self.stories.values() if not story.ending}
        assert open_handles == {session.handle for session in table if session.phase is not Phase.ENDED}

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self._note_aborted(self.table.abort_gateway("g"), {"g"}, set(self.stories))
        self._note_aborted(self.table.abort_gateway("h"), {"h"}, set(self.stories))
        for reading in self.readings:
            self.table.fail_read(reading.session.id)
        assert finish(self.table, self.step) == []
        assert not list(self.table)
        assert self.table.allocator.num_used == 0
        assert self.table._by_handle == {}


SessionTableMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestSessionTableMachine = SessionTableMachine.TestCase


# -- all sessions end ------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A whole decode worker in small: a queue before the table, and prefill workers that take a while."""

    table: SessionTable
    chunk: int
    read_delay: int  # steps between a reservation and its KV

    def run(self, queue: Sequence[Reservation], limit: int) -> tuple[dict[int, list[int]], int]:
        """handle |-> tokens, and the rounds it took. Fails when `limit` rounds are not enough."""
        waiting, heard = list(queue), {wanted.handle: list[int]() for wanted in queue}
        arrived: dict[int, int] = {}  # session id |-> round of its reservation
        memory = Memory(self.table.page_tokens)
        for round_number in range(limit):
            while waiting and self._try_reserve(waiting[0], round_number, arrived):
                waiting.pop(0)
            for session in self.table.in_phase(Phase.RECEIVING):
                if round_number >= arrived[session.id] + self.read_delay:
                    self._receive(session)
                    memory.write(session.pages, 0, session.tokens, session.limit)
            step = plan_step(self.table, self.chunk)
            for planned in step:
                compute(memory, planned, [])
            for delta in finish(self.table, step):
                heard[delta.handle].extend(delta.token_ids)
            self.table.check()
            if not waiting and not list(self.table):
                return heard, round_number
        raise AssertionError(f"after {limit} rounds {list(self.table)} are still here and {waiting} wait")

    def _try_reserve(self, wanted: Reservation, round_number: int, arrived: dict[int, int]) -> bool:
        try:
            arrived[self.table.reserve(wanted, now=0.0).id] = round_number
        except NothingToShareError:
            return self._try_reserve(replace(wanted, share_with=0), round_number, arrived)
        except NoRoomError:
            return False
        return True

    def _receive(self, session: Session) -> None:
        end, page_tokens = session.num_prompt - 1, self.table.page_tokens
        self.table.begin_read(session.id, session.attempt, 0, end, num_pages_for(end, page_tokens))
        self.table.finish_read(session.id, end, now=0.0)


@settings(max_examples=200)
@given(data=st.data())
def test_every_session_ends_in_any_pool_that_holds_the_largest(data: st.DataObject) -> None:
    """Neither deadlock nor livelock, nor a reservation refused forever, nor a token lost to preemption."""
    page_tokens = data.draw(st.integers(1, 4))
    size = st.tuples(st.integers(1, 12), st.lists(st.integers(1, 12), min_size=1, max_size=3))
    sizes = data.draw(st.lists(size, min_size=1, max_size=6))  # a prompt's length, and those of its answers
    queue: list[Reservation] = []
    for prompt, answers in sizes:
        local, leader = data.draw(st.sampled_from([0, NO_LIMIT])), len(queue) + 1
        for answer in answers:
            handle = len(queue) + 1
            wanted = reservation(handle, prompt, answer, local=local, share_with=leader if handle != leader else 0)
            queue.append(replace(wanted, prompt_ids=[leader, *wanted.prompt_ids[1:]]))
    largest = max(num_pages_for(len(each.prompt_ids) + each.max_tokens, page_tokens) for each in queue)
    table, _ = build_table(largest + data.draw(st.integers(0, 4)), page_tokens, data.draw(st.integers(1, 8)))
    worker = Worker(table, data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3)))
    # At worst one position a round, and each session computes its positions again for each page of an older one.
    limit = (4 + sum(len(each.prompt_ids) + each.max_tokens for each in queue)) * (1 + len(queue))
    heard, _rounds = worker.run(queue, limit)
    for each in queue:
        first = 1000 + len(each.prompt_ids)
        assert heard[each.handle] == list(range(first, first + each.max_tokens))
    assert table.allocator.num_used == 0


def test_many_preemptions_still_end() -> None:
    """Six sessions that were small when they came and then want the whole pool each."""
    table, _ = build_table(num_pages=14, page_tokens=2)
    queue = [reservation(number, 1, 26, local=NO_LIMIT) for number in range(6)]
    heard, rounds = Worker(table, chunk=4, read_delay=0).run(queue, limit=400)
    assert table.num_preemptions >= 5
    assert all(tokens == list(range(1001, 1027)) for tokens in heard.values())
    assert rounds < 6 * 27, "worse than one after the other"


def test_the_newest_session_is_preempted_and_resumes_with_its_tokens() -> None:
    table, _ = build_table(num_pages=14, page_tokens=2)
    old = table.reserve(reservation(1, 3, 20, local=NO_LIMIT), 0.0)
    new = table.reserve(reservation(2, 9, 16, local=NO_LIMIT), 0.0)
    while new.phase is Phase.ACTIVE:
        finish(table, plan_step(table, 8))
    assert (new.phase, new.pages, new.computed) == (Phase.PREEMPTED, [], 0)
    assert table.allocator.num_free > 3
    with pytest.raises(NoRoomError):  # newcomers do not overtake it
        table.reserve(reservation(3, 1, 1), 0.0)
    tokens = list(new.tokens)
    while old in list(table):
        finish(table, plan_step(table, 8))
    plan = plan_step(table, 99)
    assert [(step.session, step.count, step.wants_token) for step in plan] == [(new, len(tokens), True)]
    assert new.tokens == tokens
    assert table.num_preemptions == 1


def test_local_prefill_shares_a_budget_that_decoding_does_not_touch() -> None:
    table, _ = build_table(num_pages=40, page_tokens=4)
    for handle, length in enumerate([1, 1, 7, 3, 5]):
        table.reserve(reservation(handle, length, 9, local=NO_LIMIT), 0.0)
    plans = []
    for _ in range(3):
        plan = plan_step(table, chunk_tokens=5)
        plans.append([(step.session.handle, step.count, step.wants_token) for step in plan])
        finish(table, plan)
    one = [(0, 1, True), (1, 1, True)]
    assert plans == [
        [*one, (2, 5, False)],
        [*one, (2, 2, True), (3, 3, True)],
        [*one, (2, 1, True), (3, 1, True), (4, 5, True)],
    ]


def test_a_session_alone_waits_for_pages_of_one_that_receives() -> None:
    table, _ = build_table(num_pages=4, page_tokens=2)
    first = table.reserve(reservation(1, 1, 7, local=NO_LIMIT), 0.0)
    receiving = table.reserve(reservation(2, 3, 2), 0.0)
    while plan := plan_step(table, 8):
        finish(table, plan)
    assert first.phase is Phase.ACTIVE and len(first.pages) == 2
    table.abort("g", [receiving.handle])
    assert [step.session for step in plan_step(table, 8)] == [first]


def test_refusals_name_numbers_and_settings() -> None:
    table, _ = build_table(num_pages=4, page_tokens=4, max_running=1)
    with pytest.raises(NeverFitsError, match="17 tokens need 5 pages; this worker has 4: raise --kv-memory-mib"):
        table.reserve(reservation(1, 9, 8), 0.0)
    session = table.reserve(reservation(2, 9, 7), 0.0)
    with pytest.raises(NoRoomError, match="1 sessions are running, the most allowed by --max-running"):
        table.reserve(reservation(3, 1, 1), 0.0)
    with pytest.raises(OfferRefusedError, match=rf"offer of attempt 9; session {session.id} is {session.attempt}"):
        table.begin_read(session.id, 9, 0, 8, 2)
    with pytest.raises(OfferRefusedError, match=r"offer of \[4, 8\) where \[0, 8\) is wanted"):
        table.begin_read(session.id, session.attempt, 4, 8, 1)
    assert table.begin_read(session.id, session.attempt, 0, 8, 2) == session.pages[:2]
    with pytest.raises(OfferRefusedError, match="is reading another offer"):
        table.begin_read(session.id, session.attempt, 0, 8, 2)


def test_an_accepted_offer_renews_the_lease_and_a_failed_one_does_not() -> None:
    table, _ = build_table(num_pages=9, page_tokens=2)
    session = table.reserve(reservation(1, 9, 1), now=0.0)
    table.begin_read(session.id, session.attempt, 0, 4, 2)
    table.finish_read(session.id, 4, now=7.0)
    assert table.next_deadline() == 7.0 + LEASE_S
    table.begin_read(session.id, session.attempt, 4, 8, 2)
    table.fail_read(session.id)
    assert table.next_deadline() == 7.0 + LEASE_S
    assert session.computed == 4
    (delta,) = table.expire(17.0)
    assert (delta.finish_reason, delta.error) == ("expired", "no KV arrived within the lease of 10 s (--lease-s)")
    assert table.allocator.num_used == 0


def test_a_lease_does_not_end_while_an_offer_is_read() -> None:
    table, _ = build_table(num_pages=9, page_tokens=2)
    session = table.reserve(reservation(1, 9, 1), now=0.0)
    table.begin_read(session.id, session.attempt, 0, 4, 2)
    assert table.next_deadline() is None and not table.expire(LEASE_S + 5)
    table.finish_read(session.id, 4, now=LEASE_S + 6)
    assert table.next_deadline() == 2 * LEASE_S + 6
    table.begin_read(session.id, session.attempt, 4, 8, 2)
    table.fail_read(session.id)
    assert [delta.finish_reason for delta in table.expire(2 * LEASE_S + 6)] == ["expired"]


def test_reservations_of_two_gateways_may_share_a_handle() -> None:
    table, _ = build_table(num_pages=9, page_tokens=2)
    ours = reservation(1, 2, 2)
    theirs = replace(ours, gateway="h")
    assert table.reserve(ours, 0.0) is not table.reserve(theirs, 0.0)
    assert [session.gateway for session in table.abort("h", [1])] == ["h"]


# -- shared prompts --------------------------------------------------------------------------------------------------


def share(handle: int, with_whom: int, num_prompt: int = 6, max_tokens: int = 4) -> Reservation:
    return reservation(handle, num_prompt, max_tokens, share_with=with_whom)


def test_a_sharer_holds_whole_pages_with_its_leader_and_copies_the_last() -> None:
    table, generations = build_table(num_pages=20, page_tokens=4)
    leader = table.reserve(reservation(1, 6, 9), 0.0)
    waiting = table.reserve(share(2, 1), 0.0)
    assert (waiting.phase, waiting.held_pages) == (Phase.SHARING, [])
    table.begin_read(leader.id, leader.attempt, 0, 5, 2)
    table.finish_read(leader.id, 5, 1.0)
    assert waiting.phase is Phase.ACTIVE and waiting.kv_at == 1.0
    assert waiting.pages[0] == leader.pages[0] and waiting.pages[1] != leader.pages[1]
    assert waiting.copy == (leader.pages[1], waiting.pages[1])
    source = leader.pages[1]
    late = table.reserve(share(3, 2), 2.0)
    before = list(generations)
    assert late.copy == (source, late.pages[1]), "what was not copied yet cannot be copied on"
    table.abort("g", [1])
    table.check()
    assert table.allocator.num_used == 4, "the source stays until it is copied"
    finish(table, plan_step(table, 8))
    assert table.allocator.num_used == 3 and late.copy is None
    table.abort("g", [2, 3])
    assert table.allocator.num_used == 0
    assert generations == before, "no page had a new owner"


def test_a_sharer_without_a_page_of_its_own_is_computed_later() -> None:
    table, _ = build_table(num_pages=6, page_tokens=2)
    leader = table.reserve(reservation(1, 5, 3), 0.0)
    sharer = table.reserve(share(2, 1, num_prompt=5, max_tokens=1), 0.0)
    other = table.reserve(reservation(3, 1, 6), 0.0)
    while len(other.pages) < 3:
        finish(table, plan_step(table, 8))
    table.begin_read(leader.id, leader.attempt, 0, 4, 2)
    table.finish_read(leader.id, 4, 0.0)
    table.check()
    assert sharer.phase is Phase.PREEMPTED and table.allocator.num_free == 0
    heard: list[int] = []
    while list(table):
        for delta in finish(table, plan_step(table, 8)):
            heard += delta.token_ids if delta.handle == sharer.handle else ()
    assert heard == [1005]


def test_what_cannot_be_shared_is_refused() -> None:
    table, _ = build_table(num_pages=20, page_tokens=4)
    table.reserve(reservation(1, 6, 9), 0.0)
    for wanted in (share(2, 9), share(2, 2), share(2, 1, num_prompt=7), replace(share(2, 1), gateway="h")):
        with pytest.raises(NothingToShareError):
            table.reserve(wanted, 0.0)
    with pytest.raises(ValueError, match="share_with is 1 and num_prompt_logprobs 0"):
        replace(share(2, 1), num_prompt_logprobs=0)


# -- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kept", "reason", "computed"),
    [
        ([50], [50], "", 3),
        ([50, 51, 52], [50, 51, 52], "", 5),
        ([50, 7, 52], [50, 7], "stop", 4),
        ([50, 51, 52, 53, 54], [50, 51, 52, 53], "length", 6),
        ([50, 51, 52, 7, 54], [50, 51, 52, 7], "stop", 6),
    ],
)
def test_several_tokens_of_a_step(tokens: list[int], kept: list[int], reason: str, computed: int) -> None:
    """Five positions are computed: the last token and four drafts."""
    table, _ = build_table(num_pages=20, page_tokens=4)
    session = table.reserve(reservation(1, 3, 4, local=NO_LIMIT, stop_token_ids=frozenset({7})), 0.0)
    told = [TokenLogprobs(-float(token), (), ()) for token in tokens]
    delta = table.finish_step(session, 3 + 4, tokens, 1.0, told)
    assert delta is not None
    assert (list(delta.token_ids), delta.finish_reason, session.computed) == (kept, reason, computed)
    assert [one.logprob for one in delta.logprobs] == [-token for token in kept]
    assert session.num_steps == 1


def test_a_prompt_is_scored_in_pieces_and_told_once() -> None:
    table, _ = build_table(num_pages=200, page_tokens=4)
    num_prompt = 2 * MAX_SCORED + 10
    session = table.reserve(reservation(1, num_prompt, 2, local=NO_LIMIT, num_prompt_logprobs=0), 0.0)
    other = table.reserve(reservation(2, 30, 2, local=NO_LIMIT, num_prompt_logprobs=0), 0.0)
    told: dict[int, list[float]] = {1: [], 2: []}
    has_preempted = False
    while list(table):
        step = plan_step(table, 1000)
        assert sum(planned.num_scored for planned in step) <= MAX_SCORED
        for planned in step:
            one, tokens = planned.session, [next_token(planned.session)] if planned.wants_token else []
            scores = [TokenLogprobs(float(one.scored + at), (), ()) for at in range(planned.num_scored)]
            delta = table.finish_step(one, planned.count, tokens, 0.0, prompt_logprobs=scores)
            told[one.handle] += [score.logprob for score in delta.prompt_logprobs] if delta else []
        if session.computed == MAX_SCORED and not has_preempted:
            has_preempted = True
            table._preempt(session)
            table._preempt(other)
        table.check()
    assert has_preempted
    assert told == {1: list(range(1, num_prompt)), 2: list(range(1, 30))}


def test_min_tokens_count_what_earlier_attempts_emitted() -> None:
    table, _ = build_table(num_pages=20, page_tokens=4)
    stops = frozenset({7, 8})
    wanted = reservation(1, 6, 4, stop_token_ids=stops, num_emitted=2, min_tokens=4)
    session = table.reserve(wanted, 0.0)
    assert session.answer_begin == 4
    assert [session.forbidden_at(position) for position in range(6, 10)] == [stops, stops, frozenset(), frozenset()]
    with pytest.raises(ValueError, match="min_tokens is 7, but the answer has at most 6 tokens"):
        replace(wanted, min_tokens=7)
    with pytest.raises(ValueError, match="num_emitted is 6, expected less than 6 prompt_ids"):
        replace(wanted, num_emitted=6)


def test_timing_names_where_a_session_spent_its_time() -> None:
    table, _ = build_table(num_pages=20, page_tokens=4)
    session = table.reserve(reservation(1, 5, 3), 10.0)
    failed = table.fail(table.reserve(reservation(2, 5, 3), 10.0), "no luck", 13.0).timing
    assert failed is not None
    assert (failed.kv_seconds, failed.first_step_seconds, failed.decode_seconds, failed.steps) == (3.0, 0.0, 0.0, 0)
    table.begin_read(session.id, session.attempt, 0, 4, 1)
    table.finish_read(session.id, 4, 12.0)
    *none, timing = [finish(table, plan_step(table, 8), now)[0].timing for now in (15.0, 16.0, 19.5)]
    assert none == [None, None] and timing is not None
    assert (timing.kv_seconds, timing.first_step_seconds, timing.decode_seconds, timing.steps) == (2.0, 3.0, 4.5, 3)
