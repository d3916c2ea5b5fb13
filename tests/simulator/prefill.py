"""A prefill worker: the real scheduler and loop, with virtual steps and offers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from bench.simulate.virtual_time import refusal
from prefill_worker.main import BothRunners, DraftKv
from protos import kv_pb2, prefill_pb2
from runtime import rpc
from tests.simulator.decode import SimDecode
from tests.simulator.engine import VirtualDraftRunner, VirtualRunner
from tests.simulator.model import PAGE_TOKENS, Offer, find_seed
from tests.simulator.worker import BUDGET, LEASE_S, NO_METRICS, POOL, Answer, SimWorker, SteppedLoop
from tests.simulator.world import Failure, ViolationError, World
from wire.messages import unpack_retention
from wire.sampling import SamplingParams
from worker.params import SequenceParams
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.receiving import next_offer
from worker.sequences import Sequence as Tokens
from worker.sequences import Update

HEARTBEAT_S = 2.0


@dataclass(slots=True, eq=False)
class HandOver:
    """One Run call."""

    call: int
    caller: tuple[str, int]  # gateway and its epoch
    sequence: Tokens
    ticket: kv_pb2.Ticket
    answer: Answer
    offered: int
    pages: list[int]  # the sequence's pages at the start
    is_offering: bool = False
    error: str = ""
    heard_at: float = 0.0  # when the decode worker last received a message about it


class SimPrefill(SimWorker):
    """Its verbs are those of prefill.proto."""

    def __init__(
        self, world: World, name: str, num_pages: int, max_running: int, steps_ahead: int, has_draft: bool,
        num_ranks: int, num_slots: int, max_offer_pages: int, decodes: dict[str, SimDecode],
    ) -> None:  # fmt: skip
        self._decodes = decodes
        self.max_offer_pages = max_offer_pages
        super().__init__(world, name, num_pages, max_running, steps_ahead, has_draft, num_ranks, num_slots)

    def boot(self) -> None:
        super().boot()
        self.scheduler.kv.needs_draft = self.has_draft
        self._works: dict[int, HandOver] = {}  # sequence id |-> its call
        self._greeted: dict[str, str] = {}  # address |-> incarnation of the last handshake

    def build_loop(self) -> SteppedLoop:
        runner: Any = VirtualRunner(self.world, self.rows, self.memory.main, self.memory.states)
        if self.has_draft:
            draft: Any = VirtualDraftRunner(self.world, self.rows, self.memory)
            runner = BothRunners(runner, draft)
        rows: Any = self.rows
        return SteppedLoop(
            DraftKv(), self.scheduler, runner, rows, POOL, BUDGET, self.publish, NO_METRICS, self.steps_ahead
        )

    def step_delay(self) -> float:
        return self.world.slow_delay(self.world.faults.slow_steps)

    def check(self) -> None:
        super().check()
        for work in self._works.values():
            if self.scheduler.get(work.sequence.id) is None or work.sequence.pages != work.pages:
                raise ViolationError(f"{work.ticket}: pages are given back before the last acknowledgement")

    def lose_peer(self, name: str, epoch: int) -> None:
        self._cancel_where(lambda work: work.caller == (name, epoch))

    def publish(self, step: int, updates: Sequence[Update]) -> None:
        for update in updates:
            work = self._works.get(update.sequence.id)
            if work is not None:
                work.error = work.error or update.error
                self._advance(work)

    # -- verbs ---------------------------------------------------------------------------------------------------

    def run(
        self, call: int, caller: tuple[str, int], request: prefill_pb2.RunRequest, timeout_s: float, answer: Answer
    ) -> None:
        ticket, salt = request.ticket, request.cache_salt
        if self._decodes[ticket.address].revision != self.revision:
            raise ViolationError(f"{request.request_id} is prefilled by another revision than decodes it")
        params = SequenceParams(
            request.request_id, request.prompt, ticket.end, 0, salt, ticket.adapter, attempt=ticket.attempt,
            sampling=SamplingParams(0.0, seed=find_seed(salt)), retention=unpack_retention(request.retention),
        )  # fmt: skip
        if not 0 <= ticket.begin < ticket.end < params.num_prompt or ticket.begin % PAGE_TOKENS:
            answer(refusal(grpc.StatusCode.INVALID_ARGUMENT, f"positions [{ticket.begin}, {ticket.end})"))
            return
        caller_is = call, caller

        def begin() -> None:
            self._begin(caller_is, params, ticket, timeout_s, answer)

        self.restore(params, request, begin)

    def _begin(
        self, caller_is: tuple[int, tuple[str, int]], params: SequenceParams, ticket: kv_pb2.Ticket, timeout_s: float,
        answer: Answer,
    ) -> None:  # fmt: skip
        call, caller = caller_is
        try:
            sequence = self.scheduler.admit(params, self.world.now, is_kept=True)
        except NoRoomError as error:
            answer(refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), (rpc.REFUSED_FOR, rpc.NO_ROOM)))
            return
        except NeverFitsError as error:
            answer(refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
            return
        self.check_kv(sequence)
        work = HandOver(call, caller, sequence, ticket, answer, ticket.begin, list(sequence.pages))
        work.heard_at = self.world.now
        self._works[sequence.id] = work
        self.later(timeout_s, lambda: self._finish(work, Failure("deadline")))
        self.later(HEARTBEAT_S, lambda: self._renew(work))
        self.loop.thread.wake()
        self._advance(work)

    def cancel(self, call: int) -> None:
        self._cancel_where(lambda work: work.call == call)

    def _cancel_where(self, is_wanted: Callable[[HandOver], bool]) -> None:
        for work in list(self._works.values()):
            if is_wanted(work):
                self._finish(work, Failure("cancelled"))

    def _finish(self, work: HandOver, result: Any) -> None:
        if self._works.pop(work.sequence.id, None) is not None:
            self.scheduler.end(work.sequence)
            self.loop.thread.wake()
            work.answer(result)

    # -- offers --------------------------------------------------------------------------------------------------

    def _ask(self, work: HandOver, verb: Callable[[SimDecode, Answer], None], then: Callable[[Any], None]) -> None:
        """Call the ticket's decode worker. A failure ends the run; the run's end ends the wait."""
        decode = self._decodes[work.ticket.address]

        def on_answer(value: Any) -> None:
            if work.sequence.id not in self._works:
                return
            if isinstance(value, Failure):
                if value.why == "handshake":
                    self._greeted.pop(decode.name, None)
                self._finish(work, refusal(grpc.StatusCode.ABORTED, value.why))
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
        if work.sequence.id not in self._works:
            return
        self.later(HEARTBEAT_S, lambda: self._renew(work))
        if not work.is_offering and self.world.now - work.heard_at >= HEARTBEAT_S:
            ticket = work.ticket
            self._greet(
                work, lambda: self._ask(work, lambda decode, answer: decode.renew(ticket, answer), lambda _: None)
            )

    def _advance(self, work: HandOver) -> None:
        """Offer what is ready, one offer at a time."""
        if work.is_offering or work.sequence.id not in self._works:
            return
        if work.error:
            self._finish(work, refusal(grpc.StatusCode.ABORTED, work.error))
        elif work.offered == work.ticket.end:
            self._finish(work, prefill_pb2.RunResponse())
        elif (positions := next_offer(self.scheduler.kv, work.sequence, work.offered)) is not None:
            work.is_offering = True
            pages = self.scheduler.kv.pages_of(work.sequence, positions)
            slots = self.scheduler.kv.states.offered(work.sequence, positions)
            self._greet(work, lambda: self._offer(work, positions, pages, slots))

    def _offer(self, work: HandOver, positions: range, pages: list[int], slots: list[int]) -> None:
        owner = work.sequence.params.request_id, work.sequence.params.attempt
        offer = Offer(
            work.ticket, self.incarnation, owner, positions, pages, self._generations_of(work, pages), slots,
            [self.memory.slot_generations[slot] for slot in slots],
        )  # fmt: skip
        self._ask(work, lambda decode, answer: decode.offer(offer, answer), lambda _: self._take_ack(work, positions))

    def _generations_of(self, work: HandOver, pages: Sequence[int]) -> list[int]:
        """The generations that the offer promises."""
        return [self.memory.generations[page] for page in pages]

    def _take_ack(self, work: HandOver, positions: range) -> None:
        work.offered, work.is_offering, work.heard_at = positions.stop, False, self.world.now
        self._advance(work)
