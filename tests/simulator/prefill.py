"""A prefill worker: the real scheduler and loop, with virtual steps and offers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from bench.simulate.virtual_time import refusal
from prefill_worker.main import BothRunners, DraftKv
from protos import kv_pb2, prefill_pb2
from runtime import rpc
from tests.simulator.decode import SimDecode
from tests.simulator.engine import VirtualDraftRunner, VirtualRunner
from tests.simulator.model import PAGE_TOKENS, Memory, Offer, find_seed
from tests.simulator.worker import BUDGET, LEASE_S, NO_METRICS, POOL, Answer, SimWorker, SteppedLoop
from tests.simulator.world import Action, Failure, ViolationError, World
from wire.page_keys import PageKey
from wire.sampling import SamplingParams
from worker.kv_cache import Restore
from worker.params import SequenceParams
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.sequences import Sequence as Tokens
from worker.sequences import Update
from worker.tiers import plans

HEARTBEAT_S = 2.0
LEND_S = 2.0


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


@dataclass(frozen=True, slots=True)
class Lent:
    """The answer to `lend`."""

    offer: Offer  # without a session
    memory: Memory
    has_draft: list[bool]


class SimPrefill(SimWorker):
    """Its verbs are those of prefill.proto."""

    lenders: Sequence["SimPrefill"] = ()  # from which gateways let it read

    def __init__(
        self, world: World, name: str, num_pages: int, max_running: int, steps_ahead: int, has_draft: bool,
        num_ranks: int, num_slots: int, max_offer_pages: int, decodes: dict[str, SimDecode],
    ) -> None:  # fmt: skip
        self._max_offer_pages = max_offer_pages
        self._decodes = decodes
        super().__init__(world, name, num_pages, max_running, steps_ahead, has_draft, num_ranks, num_slots)

    def boot(self) -> None:
        super().boot()
        self.scheduler.kv.needs_draft = self.has_draft
        self.scheduler.kv.max_offer_pages = self._max_offer_pages
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
        params = SequenceParams(
            request.request_id, request.prompt, ticket.end, 0, salt, ticket.adapter, attempt=ticket.attempt,
            sampling=SamplingParams(0.0, seed=find_seed(salt)),
        )  # fmt: skip
        if not 0 <= ticket.begin < ticket.end < params.num_prompt or ticket.begin % PAGE_TOKENS:
            answer(refusal(grpc.StatusCode.INVALID_ARGUMENT, f"positions [{ticket.begin}, {ticket.end})"))
            return
        caller_is = call, caller

        def begin() -> None:
            self._begin(caller_is, params, ticket, timeout_s, answer)

        borrow = partial(self._borrow, request.source, self.scheduler.kv.keys_of(params), -1, begin)
        self.restore(params, borrow if request.HasField("source") else begin)

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

    # -- pages of other prefill workers ------------------------------------------------------------------------------

    def lend(self, incarnation: str, keys: Sequence[PageKey], begin: int, answer: Answer) -> None:
        if incarnation != self.incarnation:
            answer(Failure("another incarnation"))
            return
        kv, memory = self.scheduler.kv, self.memory
        loan = plans.begin_loan(kv, keys, begin, kv.max_offer_pages)
        offer = Offer(
            kv_pb2.Ticket(), incarnation, ("", 0), range(begin, begin + len(loan.pages)), loan.pages,
            self.promise(loan.pages), loan.slots,
            [memory.slot_generations[slot] for slot in loan.slots],
        )  # fmt: skip
        answer(Lent(offer, memory, [kv.cache.has_draft(page) for page in loan.pages]))
        plans.end_loan(kv, loan)
        self.is_changed = True

    def promise(self, pages: Sequence[int]) -> list[int]:
        """The generations that a loan names."""
        return [self.memory.generations[page] for page in pages]

    def _borrow(self, source: prefill_pb2.PageSource, keys: Sequence[PageKey], before: int, then: Action) -> None:
        """Read what the source has more of these pages, in parts. `before`: pages that were there at the last part."""
        begin = len(self.scheduler.kv.cache.find(keys))
        if begin <= before or begin == len(keys):
            then()
            return
        lender = next(one for one in self.lenders if one.name == source.address)

        def take(answer: Any) -> None:
            if isinstance(answer, Failure) or not answer.offer.pages:
                then()
            else:
                self._read_loan(answer, keys, partial(self._borrow, source, keys, begin, then), then)

        self.world.call(self, lender, lambda answer: lender.lend(source.incarnation, keys, begin, answer), take, LEND_S)

    def _read_loan(self, lent: Lent, keys: Sequence[PageKey], then: Action, give_up: Action) -> None:
        offer = lent.offer
        plan = plans.plan_loan(keys, offer.positions.start, len(offer.pages), len(offer.slots))
        try:
            restore = plans.begin_restore(self.scheduler, plan.keys, plan.slot_keys)
        except NoRoomError:
            give_up()
            return
        self.is_changed = True

        def end(failure: BaseException | None) -> None:
            self.end_loan(restore, lent, failure)
            self.loop.thread.wake()
            (give_up if failure else then)()

        self.read_offer(offer, lent.memory, (restore.pages, restore.slots), end)

    def end_loan(self, restore: Restore, lent: Lent, failure: BaseException | None) -> None:
        if failure is not None:
            self.world.note("loan failed", self.name, str(failure))
            plans.end_restore(self.scheduler.kv, restore, [], 0)
        else:
            self.world.note("borrowed", self.name, len(restore.pages))
            plans.end_restore(self.scheduler.kv, restore, lent.has_draft, len(restore.slots))

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
        elif (positions := self.scheduler.kv.next_offer(work.sequence, work.offered)) is not None:
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
