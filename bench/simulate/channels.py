"""Channels of a real gateway to simulated workers. Hand-offs use the real scheduler; reads of one share its link."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from bench.simulate.virtual_time import MemoryChannel, refusal
from bench.simulate.worker import SimWorker
from protos import decode_pb2, kv_pb2, prefill_pb2, worker_pb2
from runtime import rpc
from wire.messages import unpack_retention
from wire.page_keys import TOKEN_BYTES
from worker.params import SequenceParams
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.receiving import OfferRefusedError, begin_read, fail_read, finish_read, next_offer
from worker.sequences import Phase, Update
from worker.sequences import Sequence as Tokens
from worker.tiers.plans import begin_restore, end_restore, find_loan, plan_loan

REVISIONS = ("before", "after")


@dataclass(frozen=True, slots=True)
class Wires:
    """Costs of communication between processes."""

    token_s: float  # to hand over one token's KV
    call_s: float = 0.0005  # a message, one way


class WorkerChannel(MemoryChannel):
    """To one worker, alone."""

    def __init__(self, incarnation: str, worker: SimWorker, wires: Wires, lenders: Mapping[str, SimWorker]) -> None:
        """`lenders`: the latest at each address."""
        self.incarnation = incarnation
        self._lenders = lenders
        self.worker = worker
        self._is_draining = False
        self._wires = wires
        worker.publish = self.publish

    def publish(self, updates: Sequence[Update]) -> None:
        """Pass on what a step changed."""
        raise NotImplementedError

    async def message(self) -> None:
        """The time that one takes."""
        await asyncio.sleep(self._wires.call_s)

    async def Status(self, request: worker_pb2.StatusRequest, timeout: float) -> worker_pb2.WorkerStatus:
        self.worker.settle()
        scheduler = self.worker.scheduler
        layout = kv_pb2.KvLayout(weights=self.worker.weights, page_tokens=scheduler.kv.page_tokens)
        peer = kv_pb2.Peer(
            incarnation=self.incarnation, layout=layout, num_pages=scheduler.kv.cache.num_pages,
            revision=REVISIONS[self.worker.revision],
        )  # fmt: skip
        return worker_pb2.WorkerStatus(
            peer=peer, max_running=scheduler.max_running, free_pages=scheduler.kv.cache.num_spare,
            cached_pages=scheduler.kv.cache.num_cached, keys=self.worker.keys.pack(request.keys_since),
            draining=self._is_draining,
        )  # fmt: skip

    def drain(self) -> None:
        """Nothing new is admitted."""
        self._is_draining = True

    def admit(self, params: SequenceParams, is_kept: bool) -> Tokens:
        """As a worker does. Raises its refusal."""
        if self._is_draining:
            raise refusal(grpc.StatusCode.FAILED_PRECONDITION, "the worker is draining")
        try:
            with self.worker.changing() as scheduler:
                return scheduler.admit(params, asyncio.get_running_loop().time(), is_kept)
        except NoRoomError as error:
            metadata = (rpc.REFUSED_FOR, rpc.NO_ROOM)
            raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), metadata) from None
        except NeverFitsError as error:
            raise refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    async def borrow(self, source: kv_pb2.PageSource, params: SequenceParams) -> None:
        """Read what another worker has more of the prompt, unless it is gone then."""
        lender = self._lenders[source.address]
        if lender.is_dead:
            return
        kv = self.worker.scheduler.kv
        keys = kv.keys_of(params)
        begin = len(kv.cache.find(keys))
        loan = find_loan(lender.scheduler.kv, keys, begin, len(keys))
        plan = plan_loan(keys, begin, len(loan.pages), 0)
        try:
            restore = begin_restore(self.worker.scheduler, plan.keys, ())
        except NoRoomError:
            return
        await self.message()
        await asyncio.sleep(self._wires.call_s + len(restore.pages) * kv.page_tokens * self._wires.token_s)
        with self.worker.changing():
            end_restore(kv, restore, [not lender.is_dead] * len(restore.pages), 0)


@dataclass(slots=True)
class _Session:
    """A reservation."""

    sequence: Tokens
    num_reported: int = 0  # tokens of its answer


class DecodeChannel(WorkerChannel):
    """Its verbs are those of decode.proto."""

    def __init__(
        self, address: str, incarnation: str, worker: SimWorker, wires: Wires, lenders: Mapping[str, SimWorker]
    ) -> None:
        super().__init__(incarnation, worker, wires, lenders)
        self._address = address
        self._sessions: dict[int, _Session] = {}  # handle |-> session
        self._events: asyncio.Queue[decode_pb2.StepEvents] = asyncio.Queue()
        self._link_free_at = 0.0  # end of the last read requested so far

    async def Steps(self, request: decode_pb2.StepsRequest) -> AsyncIterator[decode_pb2.StepEvents]:
        self._loop = asyncio.get_running_loop()
        yield decode_pb2.StepEvents(incarnation=self.incarnation)
        while True:
            yield await self._events.get()

    async def Reserve(self, request: decode_pb2.ReserveRequest, timeout: float) -> decode_pb2.ReserveResponse:
        await self.message()
        params = SequenceParams(
            request.request_id, request.prompt, len(request.prompt) // TOKEN_BYTES - 1, request.max_tokens,
            local_prefill_max_tokens=request.local_prefill_max_tokens, gateway=request.gateway, handle=request.handle,
            attempt=request.attempt, num_emitted=request.num_emitted, retention=unpack_retention(request.retention),
        )  # fmt: skip
        if request.HasField("source"):
            await self.borrow(request.source, params)
        try:
            sequence = self.admit(params, is_kept=False)
        finally:
            await self.message()
        self._sessions[request.handle] = _Session(sequence)
        ticket = kv_pb2.Ticket(address=self._address, session=request.handle, begin=sequence.num_cached, end=params.end)
        return decode_pb2.ReserveResponse(ticket=ticket, needs_prefill=sequence.phase is Phase.RECEIVING)

    async def Abort(self, request: decode_pb2.AbortRequest, timeout: float) -> decode_pb2.AbortResponse:
        with self.worker.changing() as scheduler:
            scheduler.abort(request.gateway, set(request.handles))
        for handle in request.handles:
            self._sessions.pop(handle, None)
        return decode_pb2.AbortResponse()

    def publish(self, updates: Sequence[Update]) -> None:
        deltas: list[decode_pb2.SessionDelta] = []
        for update in updates:
            params = update.sequence.params
            session = self._sessions.setdefault(params.handle, _Session(update.sequence))
            num_tokens = len(update.sequence.tokens) - params.num_prompt
            new = [self.worker.revision] * (num_tokens - session.num_reported)
            delta = decode_pb2.SessionDelta(handle=params.handle, attempt=params.attempt, token_ids=new)
            delta.finish_reason, delta.error = update.finish_reason, update.error
            deltas.append(delta)
            session.num_reported = num_tokens
            if update.finish_reason:
                del self._sessions[params.handle]
        events = decode_pb2.StepEvents(deltas=deltas)
        self._loop.call_later(self._wires.call_s, self._events.put_nowait, events)

    async def read(self, handle: int, positions: range, num_pages: int) -> None:
        """Take over the KV of these positions. Raises a refusal where the session is over."""
        if handle not in self._sessions:
            raise refusal(grpc.StatusCode.ABORTED, "the session is not open here")
        session = self._sessions[handle].sequence
        now = asyncio.get_running_loop().time()
        try:
            begin_read(
                self.worker.scheduler, session.id, session.params.attempt, positions.start, positions.stop, num_pages
            )
        except OfferRefusedError as error:
            raise refusal(grpc.StatusCode.ABORTED, error.detail) from None
        self._link_free_at = max(self._link_free_at, now) + len(positions) * self._wires.token_s
        try:
            await asyncio.sleep(self._link_free_at - now)
        except asyncio.CancelledError:  # the prefill worker has died, or stopped
            with self.worker.changing() as scheduler:
                fail_read(scheduler, session.id)
            raise
        now = asyncio.get_running_loop().time()
        if positions.stop == session.params.end:
            with self.worker.changing() as scheduler:
                finish_read(scheduler, session.id, positions.stop, now)
        else:
            finish_read(self.worker.scheduler, session.id, positions.stop, now)


class PrefillChannel(WorkerChannel):
    """Its verbs are those of prefill.proto."""

    def __init__(
        self, incarnation: str, worker: SimWorker, wires: Wires, lenders: Mapping[str, SimWorker],
        decodes: Mapping[str, DecodeChannel], note_mispaired: Callable[[], None],
    ) -> None:  # fmt: skip
        """`decodes`: as `lenders`. `note_mispaired`: called where it hands over to a worker of another revision."""
        super().__init__(incarnation, worker, wires, lenders)
        self._note_mispaired = note_mispaired
        self._decodes = decodes
        self._runs: dict[int, asyncio.Event] = {}  # sequence id |-> more of it is computed

    async def Run(self, request: prefill_pb2.RunRequest, timeout: float) -> prefill_pb2.RunResponse:
        await self.message()
        ticket = request.ticket
        retention = unpack_retention(request.retention)
        params = SequenceParams(request.request_id, request.prompt, ticket.end, retention=retention)
        if request.HasField("source"):
            await self.borrow(request.source, params)
        try:
            sequence = self.admit(params, is_kept=True)
        except grpc.aio.AioRpcError:
            await self.message()
            raise
        computed = self._runs[sequence.id] = asyncio.Event()
        try:
            await self._hand_over(sequence, ticket, computed)
        finally:
            del self._runs[sequence.id]
            with self.worker.changing() as scheduler:
                scheduler.end(sequence)
        await self.message()
        return prefill_pb2.RunResponse(cached_tokens=max(ticket.begin, sequence.num_cached))

    async def _hand_over(self, sequence: Tokens, ticket: kv_pb2.Ticket, computed: asyncio.Event) -> None:
        """Offer what is ready, one offer at a time."""
        offered, decode = ticket.begin, self._decodes[ticket.address]
        if decode.worker.is_dead:
            raise refusal(grpc.StatusCode.UNAVAILABLE, f"{ticket.address} is gone")
        if decode.worker.revision != self.worker.revision:
            self._note_mispaired()
        while offered < ticket.end:
            positions = next_offer(self.worker.scheduler.kv, sequence, offered)
            if positions is None:
                computed.clear()
                await computed.wait()
                continue
            num_pages = len(self.worker.scheduler.kv.pages_of(sequence, positions))
            await self.message()
            await decode.read(ticket.session, positions, num_pages)
            offered = positions.stop
            await self.message()

    def publish(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if update.sequence.id in self._runs:
                self._runs[update.sequence.id].set()


class BothChannel(MemoryChannel):
    """To a worker of both roles."""

    def __init__(self, decode: DecodeChannel, prefill: PrefillChannel) -> None:
        """Over the same worker."""
        self._decode, self._prefill = decode, prefill
        self.worker = decode.worker
        self._roles: Sequence[str] = ("prefill", "decode")
        decode.worker.publish = self.publish

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        parts: Mapping[str, MemoryChannel] = {"Decode": self._decode, "Prefill": self._prefill}
        part = parts.get(path.split("/")[1].rpartition(".")[2])
        return part.unary_unary(path) if part is not None else super().unary_unary(path)

    unary_stream = unary_unary

    def drain(self) -> None:
        self._decode.drain()
        self._prefill.drain()

    def publish(self, updates: Sequence[Update]) -> None:
        answers = [update for update in updates if update.sequence.params.max_tokens]
        self._prefill.publish([update for update in updates if not update.sequence.params.max_tokens])
        if answers:
            self._decode.publish(answers)

    async def Status(self, request: worker_pb2.StatusRequest, timeout: float) -> worker_pb2.WorkerStatus:
        status, worker = await self._decode.Status(request, timeout), self.worker
        status.num_running = worker.scheduler.num_running
        status.prompt_tokens_waiting = worker.scheduler.num_tokens_waiting
        status.prompt_tokens_per_second = worker.prompt_tokens / (worker.prompt_s or 1.0)
        status.roles.extend(self._roles)
        return status

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, timeout: float) -> worker_pb2.SetRolesResponse:
        self._roles = tuple(request.roles)
        return worker_pb2.SetRolesResponse()
