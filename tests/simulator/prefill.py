"""A prefill worker: the real run table and step planning, with virtual steps and offers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.kvcache.allocator import NeverFitsError, NoRoomError, PageAllocator
from gateway.ring.request_events import Prefilled, Refused
from prefill_worker.batching import Planned, plan_step
from prefill_worker.run_table import PrefillRun, RunTable
from tests.simulator.decode import CHUNK_TOKENS, LEASE_S, Answer, SimDecode
from tests.simulator.model import PAGE_TOKENS, Memory, Offer, Ticket
from tests.simulator.world import Failure, Process, ViolationError, World

HEARTBEAT_S = 2.0


@dataclass(slots=True, eq=False)
class HandOver:
    """One Run call."""

    call: int
    caller: tuple[str, int]  # gateway and its epoch
    run: PrefillRun
    ticket: Ticket
    answer: Answer
    offered: int = 0
    is_offering: bool = False
    last_news: float = 0.0


class SimPrefill(Process):
    """Verbs are those of prefill.proto."""

    def __init__(self, world: World, name: str, num_pages: int, max_running: int, decodes: dict[str, SimDecode]):
        self._num_pages = num_pages
        self.max_running = max_running
        self._decodes = decodes
        super().__init__(world, name)

    def boot(self) -> None:
        self.memory = Memory(self._num_pages)
        self.table = RunTable(PageAllocator(self._num_pages, self.memory.generations), PAGE_TOKENS, self.max_running)
        self._works: dict[int, HandOver] = {}  # run id |-> its call
        self._greeted: dict[str, str] = {}  # address |-> incarnation that we shook hands with
        self._is_stepping = False
        self._stepped: list[PrefillRun] = []

    def check(self) -> None:
        self.table.check()
        kept = {run.id for run in self.table}
        for work in self._works.values():
            if work.run.id not in kept:
                raise ViolationError(f"{work.ticket}: pages are free before the last acknowledgement")

        if any(run.id not in kept for run in self._stepped):
            raise ViolationError("pages are free under a step")

    def lose_peer(self, name: str, epoch: int) -> None:
        self._cancel_where(lambda work: work.caller == (name, epoch))

    # -- verbs ---------------------------------------------------------------------------------------------------

    def run(
        self, call: int, caller: tuple[str, int], request: str, prompt: Sequence[int], ticket: Ticket, timeout_s: float,
        answer: Answer,
    ) -> None:  # fmt: skip
        try:
            run = self.table.start(request, prompt, ticket.end)
        except NoRoomError as error:
            answer(Refused("prefill", "no room", str(error)))
            return
        except NeverFitsError as error:
            answer(Refused("prefill", "invalid", str(error)))
            return
        work = HandOver(call, caller, run, ticket, answer, last_news=self.world.now)
        self._works[run.id] = work
        self.later(timeout_s, lambda: self._finish(work, Failure("deadline")))
        self.later(HEARTBEAT_S, lambda: self._renew(work))
        self._wake()

    def cancel(self, call: int) -> None:
        self._cancel_where(lambda work: work.call == call)

    def _cancel_where(self, is_wanted: Callable[[HandOver], bool]) -> None:
        for work in list(self._works.values()):
            if is_wanted(work):
                self._finish(work, Failure("cancelled"))

    def _finish(self, work: HandOver, result: Any) -> None:
        if self._works.pop(work.run.id, None) is not None:
            self.table.end(work.run)
            work.answer(result)

    # -- offers --------------------------------------------------------------------------------------------------

    def _ask(self, work: HandOver, verb: Callable[[SimDecode, Answer], None], then: Callable[[Any], None]) -> None:
        """Call the ticket's decode worker; a failure ends the run, and so does its end the wait."""
        decode = self._decodes[work.ticket.address]

        def on_answer(value: Any) -> None:
            if work.run.id not in self._works:
                return
            if isinstance(value, Failure):
                if value.why == "handshake":
                    self._greeted.pop(decode.name, None)
                self._finish(work, Refused("prefill", "failed", value.why))
            else:
                then(value)

        self.world.call(self, decode, lambda answer: verb(decode, answer), on_answer, LEASE_S)

    def _greet(self, work: HandOver, then: Callable[[], None]) -> None:
        if self._greeted.get(work.ticket.address) == work.ticket.incarnation:
            then()
            return

        def note(incarnation: str) -> None:
            self._greeted[work.ticket.address] = incarnation
            then()

        me, memory = self.incarnation, self.memory
        self._ask(work, lambda decode, answer: decode.handshake(self.name, me, memory, answer), note)

    def _renew(self, work: HandOver) -> None:
        if work.run.id not in self._works:
            return
        self.later(HEARTBEAT_S, lambda: self._renew(work))
        if not work.is_offering and self.world.now - work.last_news >= HEARTBEAT_S:
            ticket = work.ticket
            self._greet(
                work, lambda: self._ask(work, lambda decode, answer: decode.renew(ticket, answer), lambda _: None)
            )

    def _advance(self, work: HandOver) -> None:
        """Offer what can be offered, one offer at a time."""
        positions = self.table.next_offer(work.run, work.offered)
        if work.is_offering or work.run.id not in self._works or positions is None:
            return
        work.is_offering = True
        self._greet(work, lambda: self._offer(work, positions))

    def _offer(self, work: HandOver, positions: range) -> None:
        pages = self.table.pages_of(work.run, positions)
        generations = [self.memory.generations[page] for page in pages]
        offer = Offer(work.ticket, self.incarnation, positions, pages, generations)
        self._ask(work, lambda decode, answer: decode.offer(offer, answer), lambda _: self._take_ack(work, positions))

    def _take_ack(self, work: HandOver, positions: range) -> None:
        work.offered, work.is_offering, work.last_news = positions.stop, False, self.world.now
        if work.offered == work.run.end:
            self._finish(work, Prefilled())
        else:
            self._advance(work)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self.later(0.0, self._begin_step)

    def _begin_step(self) -> None:
        planned = plan_step(self.table, CHUNK_TOKENS)
        self._is_stepping = bool(planned)
        self._stepped = [step.run for step in planned]
        if planned:
            after = self.world.slow_delay(self.world.faults.slow_steps)
            self.later(after, lambda: self._finish_step(planned))

    def _finish_step(self, planned: list[Planned]) -> None:
        is_failed = self.world.rng.random() < self.world.faults.loss / 4
        for step in planned:
            run = step.run
            work = self._works.get(run.id)
            owner = (run.request_id, work.ticket.attempt if work else -run.id)
            chunk = run.prompt_ids[run.computed : run.computed + step.count]
            self.memory.compute(owner, run.pages, run.computed, chunk)
            if work:
                self.memory.check_owned(owner, run.pages, run.computed + step.count)
            if is_failed:
                self.table.fail_step(run)
            else:
                self.table.finish_step(run, step.count)
            if work and is_failed:
                self._finish(work, Refused("prefill", "failed", "the prefill step failed"))
            elif work:
                work.last_news = self.world.now
                self._advance(work)
        self._begin_step()
