"""A decode worker: the real scheduler, loop and speculation, with virtual steps, reads and streams."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc

from bench.simulate.virtual_time import refusal
from decode_worker.interfaces import Masks
from decode_worker.service import build_params
from decode_worker.speculation.drafters import Draft, Drafter, ModelDrafter, Wanted
from decode_worker.speculation.lengths import CostMeter
from decode_worker.speculation.speculator import Speculator
from decode_worker.step_extras import DraftsAndMasks
from protos import decode_pb2, kv_pb2, worker_pb2
from runtime import rpc
from tests.simulator.engine import VirtualDraftRunner, VirtualRunner
from tests.simulator.model import Memory, Offer
from tests.simulator.worker import BUDGET, NO_METRICS, POOL, Answer, SimWorker, SteppedLoop
from tests.simulator.world import Failure, Process, ViolationError
from worker import receiving
from worker.admission import OverGoalError
from worker.params import SequenceParams
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.receiving import OfferRefusedError
from worker.sequences import Phase, Update

MAX_DRAFT_TOKENS = 3


class Stream:
    """One Steps stream: messages arrive in order until it breaks; each end notices that in its own time."""

    def __init__(
        self,
        name: str,
        gateway: Process,
        on_delta: Callable[[decode_pb2.SessionDelta], None],
        on_end: Callable[[], None],
    ):
        self.name = name
        self.gateway = gateway
        self.epoch = gateway.epoch
        self.is_broken = False
        self._on_delta = on_delta
        self._on_end = on_end
        self._arrival = 0.0  # of the last message sent

    def push(self, worker: "SimDecode", update: Update) -> None:
        world = worker.world
        if self.is_broken:
            return
        if world.is_lost(worker.name, self.gateway.name):
            self.break_off(worker)
            return
        params = update.sequence.params
        delta = decode_pb2.SessionDelta(
            handle=params.handle, attempt=params.attempt, token_ids=update.token_ids,
            finish_reason=update.finish_reason, error=update.error,
        )  # fmt: skip
        self._arrival = max(self._arrival + 1e-6, world.now + world.delay())
        world.at(self._arrival - world.now, self.gateway, self.epoch, lambda: self._on_delta(delta))

    def break_off(self, worker: "SimDecode") -> None:
        if not self.is_broken:
            self.is_broken = True
            world = worker.world
            after = max(self._arrival - world.now, 0.0) + world.delay()
            world.at(after, self.gateway, self.epoch, self._on_end)
            worker.later(world.delay(), lambda: worker.end_stream(self.name))


RESTORE_WAIT_S = 1.0


class SimDrafter(ModelDrafter):
    """Makes some of its chains trees, in which each draft has a sibling: that is right where the draft is wrong."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        return [self._fork(draft) if len(draft.token_ids) > 1 else draft for draft in super().propose(wanted)]

    def _fork(self, draft: Draft) -> Draft:
        if draft.token_ids[0] % 3 == 0:
            return draft
        tokens, parents, last = list[int](), list[int](), 0
        for token in draft.token_ids:
            tokens += sorted((token, token ^ 1))
            parents += [last, last]
            last = tokens.index(token, len(tokens) - 2) + 1
        count = len(draft.token_ids)  # for which there are pages
        return Draft(tokens[:count], parents[:count], lead=0)


class SimDecode(SimWorker):
    """Its verbs are those of decode.proto."""

    _peers: dict[str, tuple[str, Memory]]  # address |-> incarnation and its pool

    most_new_answers = 0  # that keep the goal; 0: there is none

    def boot(self) -> None:
        self._peers = getattr(self, "_peers", {})
        self._forget_peers()
        self._streams: dict[str, Stream] = {}
        super().boot()
        self.scheduler.most_answers = lambda limit: self.most_new_answers or limit

    def status(self, request: worker_pb2.StatusRequest) -> worker_pb2.WorkerStatus:
        status = super().status(request)
        status.goal_answers = self.most_new_answers
        return status

    def check(self) -> None:
        super().check()
        going = [one for one in self.scheduler if one.phase is not Phase.ENDED and not one.params.num_emitted]
        if len(going) > (self.most_new_answers or len(going)):
            raise ViolationError(f"{self.name} has {len(going)} new answers, more than keep the goal")

    def _forget_peers(self) -> None:
        self._peers = {}

    def build_loop(self) -> SteppedLoop:
        runner: Any = VirtualRunner(self.world, self.rows, self.memory.main, self.memory.states)
        drafters: dict[str, Drafter] = {}
        if self.has_draft:
            draft: Any = VirtualDraftRunner(self.world, self.rows, self.memory)
            kind = ModelDrafter if self.memory.states else SimDrafter
            drafters["draft"] = kind(draft, CostMeter(), BUDGET.prompt_tokens)
        speculate = "auto" if drafters else "off"
        self._speculator = Speculator(drafters, CostMeter(), speculate, MAX_DRAFT_TOKENS, self.steps_ahead > 0)
        extras, rows = DraftsAndMasks(self._speculator, Masks(), self.scheduler), cast(Any, self.rows)
        return SteppedLoop(
            extras, self.scheduler, runner, rows, POOL, BUDGET, self.publish, NO_METRICS, self.steps_ahead
        )

    def step_delay(self) -> float:
        share = self.world.faults.slow_decode_steps
        return self.world.slow_delay(share) if share else super().step_delay()

    def crash(self) -> None:
        for stream in self._streams.values():
            stream.break_off(self)
        super().crash()

    def lose_peer(self, name: str, epoch: int) -> None:
        for stream in list(self._streams.values()):
            if stream.gateway.name == name and stream.epoch == epoch:
                self.end_stream(stream.name)

    def publish(self, step: int, updates: Sequence[Update]) -> None:
        for update in updates:
            stream = self._streams.get(update.sequence.params.gateway)
            if stream is not None:
                stream.push(self, update)

    # -- verbs ---------------------------------------------------------------------------------------------------

    def steps(self, stream: Stream, answer: Answer) -> None:
        self._streams[stream.name] = stream
        answer(self.incarnation)

    def end_stream(self, name: str) -> None:
        if self._streams.pop(name, None) is not None:
            self.scheduler.abort(name)
            self.loop.thread.wake()

    def reserve(self, request: decode_pb2.ReserveRequest, answer: Answer) -> None:
        if request.gateway not in self._streams:
            answer(refusal(grpc.StatusCode.FAILED_PRECONDITION, "no Steps stream"))
            return
        params = build_params(request, *self._speculator.resolve(request.speculation.drafter, 0), None)
        began = self.world.now
        self.restore(params, request, lambda: self._admit(params, began, answer))

    def _admit(self, params: SequenceParams, began: float, answer: Answer) -> None:
        if params.gateway not in self._streams:
            answer(refusal(grpc.StatusCode.FAILED_PRECONDITION, "no Steps stream"))
            return
        if self.world.now - began > RESTORE_WAIT_S:
            answer(refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "being read", (rpc.REFUSED_FOR, rpc.RESTORING)))
            return
        try:
            sequence = self.scheduler.admit(params, self.world.now)
        except NoRoomError as error:
            why = rpc.OVER_GOAL if isinstance(error, OverGoalError) else rpc.NO_ROOM
            answer(refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), (rpc.REFUSED_FOR, why)))
            return
        except NeverFitsError as error:
            answer(refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
            return
        self.loop.thread.wake()
        self.check_kv(sequence)
        ticket = kv_pb2.Ticket(
            address=self.name, incarnation=self.incarnation, session=sequence.id, attempt=sequence.params.attempt,
            begin=sequence.num_cached, end=sequence.params.end,
        )  # fmt: skip
        answer(decode_pb2.ReserveResponse(ticket=ticket, needs_prefill=sequence.phase is Phase.RECEIVING))

    def abort(self, request: decode_pb2.AbortRequest, answer: Answer) -> None:
        self.scheduler.abort(request.gateway, set(request.handles))
        self.loop.thread.wake()
        answer(decode_pb2.AbortResponse())

    def handshake(self, address: str, incarnation: str, memory: Memory, answer: Answer) -> None:
        self._peers[address] = (incarnation, memory)
        answer(self.incarnation)

    def renew(self, ticket: kv_pb2.Ticket, answer: Answer) -> None:
        try:
            self._check_ticket(ticket)
            receiving.renew(self.scheduler, ticket.session, ticket.attempt, self.world.now)
        except OfferRefusedError as error:
            answer(Failure(error.detail))
        else:
            answer(None)

    def offer(self, offer: Offer, answer: Answer) -> None:
        """Each rank reads the pages, one after the other; then the answer acknowledges the offer."""
        ticket = offer.ticket
        try:
            self._check_ticket(ticket)
            memory = next((memory for name, memory in self._peers.values() if name == offer.incarnation), None)
            if memory is None:
                raise OfferRefusedError("handshake", "not shaken hands")
            begin, end = offer.positions.start, offer.positions.stop
            pages, slots = receiving.begin_read(
                self.scheduler, ticket.session, ticket.attempt, begin, end, len(offer.pages), len(offer.slots)
            )
        except OfferRefusedError as error:
            answer(Failure(error.reason))
            return
        sequence = self.scheduler[ticket.session]
        if offer.owner != (sequence.params.request_id, sequence.params.attempt):
            raise ViolationError(f"{sequence.params.request_id}#{ticket.attempt} reads an offer made for {offer.owner}")
        self.read_offer(offer, memory, (pages, slots), lambda failure: self._end_read(offer, failure, answer))

    def _check_ticket(self, ticket: kv_pb2.Ticket) -> None:
        if ticket.incarnation != self.incarnation:
            raise OfferRefusedError("incarnation", ticket.incarnation)

    def _end_read(self, offer: Offer, failure: BaseException | None, answer: Answer) -> None:
        if failure is not None:
            self.world.note("read failed", self.name, offer.ticket, str(failure))
            receiving.fail_read(self.scheduler, offer.ticket.session)
            answer(Failure(getattr(failure, "reason", "transport")))
        else:
            receiving.finish_read(
                self.scheduler, offer.ticket.session, offer.positions.stop, self.world.now, len(offer.slots)
            )
            sequence = self.scheduler._sequences.get(offer.ticket.session)
            if sequence is not None and sequence.phase is not Phase.ENDED:
                self.check_kv(sequence)
            answer(None)
        self.loop.thread.wake()
