"""A decode worker: the real session table and step planning, with virtual steps, reads and streams."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from decode_worker.batching import Planned, plan_step
from decode_worker.session import Delta, NothingToShareError, OfferRefusedError, Phase, Reservation, Session
from decode_worker.session_table import SessionTable
from engine.kvcache.allocator import NeverFitsError, NoRoomError, PageAllocator
from gateway.ring.request_events import Refused
from kvtransfer import reader
from tests.simulator.model import PAGE_TOKENS, Memory, Offer, Owner, Ticket
from tests.simulator.world import Failure, Process, World

Answer = Callable[[Any], None]
CHUNK_TOKENS = 4
LEASE_S = 4.0


class Stream:
    """One Steps stream: messages arrive in order until it breaks; each end learns of that in its own time."""

    def __init__(self, name: str, gateway: Process, on_news: Callable[[Delta], None], on_end: Callable[[], None]):
        self.name = name
        self.gateway = gateway
        self.epoch = gateway.epoch
        self.is_broken = False
        self._on_news = on_news
        self._on_end = on_end
        self._arrival = 0.0  # of the last message sent

    def push(self, worker: "SimDecode", delta: Delta) -> None:
        world = worker.world
        if self.is_broken:
            return
        if world.is_lost(worker.name, self.gateway.name):
            self.break_off(worker)
            return
        self._arrival = max(self._arrival + 1e-6, world.now + world.delay())
        world.at(self._arrival - world.now, self.gateway, self.epoch, lambda: self._on_news(delta))

    def break_off(self, worker: "SimDecode") -> None:
        if not self.is_broken:
            self.is_broken = True
            world = worker.world
            after = max(self._arrival - world.now, 0.0) + world.delay()
            world.at(after, self.gateway, self.epoch, self._on_end)
            worker.later(world.delay(), lambda: worker.end_stream(self.name))


class SimDecode(Process):
    """Verbs are those of decode.proto."""

    def __init__(self, world: World, name: str, num_pages: int, max_running: int) -> None:
        self._num_pages = num_pages
        self.max_running = max_running
        self._peers: dict[str, tuple[str, Memory]] = {}  # address |-> incarnation and its pool
        super().__init__(world, name)

    def _forget_peers(self) -> None:
        self._peers = {}

    def boot(self) -> None:
        self._forget_peers()
        self.memory = Memory(self._num_pages)
        allocator = PageAllocator(self._num_pages, self.memory.generations)
        self.table = SessionTable(allocator, PAGE_TOKENS, self.max_running, LEASE_S)
        self._streams: dict[str, Stream] = {}
        self._is_stepping = False
        self._alarm = float("inf")  # when it will next look at deadlines
        self._owners: dict[tuple[int, ...], set[Owner]] = {}  # prompt |-> sessions that have, or had, it

    def crash(self) -> None:
        for stream in self._streams.values():
            stream.break_off(self)
        super().crash()

    def check(self) -> None:
        self.table.check()
        deadline = self.table.next_deadline()
        if deadline is not None and deadline < self._alarm and not self._is_stepping:
            self._alarm = deadline
            self.later(max(deadline - self.world.now, 0.0), self._ring)

    def lose_peer(self, name: str, epoch: int) -> None:
        for stream in list(self._streams.values()):
            if stream.gateway.name == name and stream.epoch == epoch:
                self.end_stream(stream.name)

    # -- verbs ---------------------------------------------------------------------------------------------------

    def steps(self, stream: Stream, answer: Answer) -> None:
        self._streams[stream.name] = stream
        answer(self.incarnation)

    def end_stream(self, name: str) -> None:
        if self._streams.pop(name, None) is not None:
            self.table.abort_gateway(name)
            self._wake()

    def reserve(self, wanted: Reservation, answer: Answer) -> None:
        if wanted.gateway not in self._streams:
            answer(Refused("decode", "absent", "no Steps stream"))
            return
        wanted = replace(wanted, share_with=self._find_twin(wanted))
        try:
            session = self.table.reserve(wanted, self.world.now)
        except NothingToShareError as error:
            answer(Refused("decode", "unshared", str(error)))
            return
        except NoRoomError as error:
            answer(Refused("decode", "no room", str(error)))
            return
        except NeverFitsError as error:
            answer(Refused("decode", "invalid", str(error)))
            return
        self._owners.setdefault(tuple(wanted.prompt_ids), set()).add((wanted.request_id, wanted.attempt))
        ticket = Ticket(self.name, self.incarnation, session.id, session.attempt, session.num_prompt - 1)
        answer((ticket, session.phase is Phase.RECEIVING))
        self._wake()

    def _find_twin(self, wanted: Reservation) -> int:
        """What a gateway that asks for several answers names: its oldest session with the same prompt."""
        prompt = list(wanted.prompt_ids)
        twins = (
            session.handle
            for session in self.table
            if session.phase is not Phase.ENDED
            and (session.gateway, list(session.wanted.prompt_ids)) == (wanted.gateway, prompt)
            and session.handle != wanted.handle
        )
        return next(twins, 0)

    def abort(self, gateway: str, handle: int) -> None:
        self.table.abort(gateway, [handle])
        self._wake()

    def handshake(self, address: str, incarnation: str, memory: Memory, answer: Answer) -> None:
        self._peers[address] = (incarnation, memory)
        answer(self.incarnation)

    def renew(self, ticket: Ticket, answer: Answer) -> None:
        try:
            self._check_ticket(ticket)
            self.table.renew(ticket.session, ticket.attempt, self.world.now)
        except OfferRefusedError as error:
            answer(Failure(error.detail))
        else:
            answer(None)

    def offer(self, offer: Offer, answer: Answer) -> None:
        """Read the pages, one after the other; the answer is the acknowledgement."""
        ticket = offer.ticket
        try:
            self._check_ticket(ticket)
            memory = next((memory for name, memory in self._peers.values() if name == offer.incarnation), None)
            if memory is None:
                raise OfferRefusedError("handshake", "not shaken hands")
            begin, end = offer.positions.start, offer.positions.stop
            targets = self.table.begin_read(ticket.session, ticket.attempt, begin, end, len(offer.pages))
        except OfferRefusedError as error:
            answer(Failure(error.reason))
            return
        self._read(offer, memory, targets, 0, answer)

    def _check_ticket(self, ticket: Ticket) -> None:
        if ticket.incarnation != self.incarnation:
            raise OfferRefusedError("incarnation", ticket.incarnation)

    def _read(self, offer: Offer, memory: Memory, targets: Sequence[int], done: int, answer: Answer) -> None:
        if done < len(targets):
            self.memory.pages[targets[done]] = list(memory.pages[offer.pages[done]])
            after = self.world.slow_delay(self.world.faults.slow_reads)
            self.later(after, lambda: self._read(offer, memory, targets, done + 1, answer))
            return
        sources = [reader.PageRef(*promised) for promised in zip(offer.pages, offer.generations, strict=True)]
        try:
            reader.check_generations(sources, [memory.generations[page] for page in offer.pages])
        except reader.ReadError as error:
            self.world.note("read failed", self.name, offer.ticket, error.detail)
            self.table.fail_read(offer.ticket.session)
            answer(Failure(error.reason))
        else:
            self.table.finish_read(offer.ticket.session, offer.positions.stop, self.world.now)
            self._check_believed(offer.ticket.session)
            answer(None)
        self._wake()

    def _check_believed(self, session_id: int) -> None:
        """What a session takes for its KV is its own."""
        for session in self.table:
            if session.id == session_id and session.phase is not Phase.ENDED:
                self._check_owned(session, session.pages, session.computed)

    def _check_owned(self, session: Session, pages: Sequence[int], num_tokens: int) -> None:
        twins = self._owners[tuple(session.wanted.prompt_ids)]
        owner = (session.request_id, session.attempt)
        self.memory.check_owned(owner, pages, num_tokens, twins, session.limit)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        self._alarm = float("inf")
        self._wake()

    def _wake(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self.later(0.0, self._begin_step)

    def _begin_step(self) -> None:
        self._publish(self.table.expire(self.world.now))
        planned = plan_step(self.table, CHUNK_TOKENS)
        self._is_stepping = bool(planned)
        if planned:
            places = [(step.session.pages, step.session.computed) for step in planned]
            self.later(self.world.delay(), lambda: self._finish_step(planned, places))

    def _finish_step(self, planned: list[Planned], places: list[tuple[list[int], int]]) -> None:
        is_failed = self.world.rng.random() < self.world.faults.loss / 4
        news: list[Delta | None] = []
        for step, (pages, begin) in zip(planned, places, strict=True):
            session, end = step.session, begin + step.count
            if session.copy is not None:
                self.memory.copy(*session.copy)
            self.memory.compute((session.request_id, session.attempt), pages, begin, session.tokens[begin:end])
            self._check_owned(session, pages, end)
            if is_failed:
                news.append(self.table.fail(session, "the engine step failed", self.world.now))
            else:
                tokens = [self.memory.next_token(pages, end)] if step.wants_token else []
                news.append(self.table.finish_step(session, step.count, tokens, self.world.now))
        self._publish([delta for delta in news if delta is not None])
        self._begin_step()

    def _publish(self, news: Sequence[Delta]) -> None:
        for delta in news:
            stream = self._streams.get(delta.gateway)
            if stream is not None:
                stream.push(self, delta)
