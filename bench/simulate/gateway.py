"""A gateway: the real queue, router, request machine, attempts and worker states; calls and hand-offs are virtual.

Hand-offs use the real scheduler: offers in order, one read of a session at a time. Reads of a decode worker share its
link.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from bench.simulate.events import Clock
from bench.simulate.worker import MODEL, SimWorker
from gateway.ring.attempt_state import AttemptState
from gateway.ring.decode_state import DecodeState
from gateway.ring.generation import Generation, Tokens
from gateway.ring.policy import Placement, Unready, Wait, WorkerView
from gateway.ring.queue import Queue, Waiter
from gateway.ring.request_machine import Phase, Request
from gateway.ring.request_steps import Event, Prefilled, Refused, Role, update_of
from gateway.ring.routing import Held, Router
from gateway.ring.worker_state import POLL_S, WorkerState
from protos import decode_pb2, kv_pb2, prefill_pb2
from worker import sequences
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.sequences import SequenceParams, Update

FOR_EVER = float("inf")


@dataclass(frozen=True, slots=True)
class Wires:
    """Costs of communication between processes."""

    token_s: float  # to hand over one token's KV
    call_s: float = 0.0005  # a message, one way


@dataclass(slots=True, eq=False)
class Life:
    """One request, and its current attempt's sequences on workers."""

    request: Request
    on_end: "Callable[[Life], None]"
    attempt: AttemptState | None = None
    session: sequences.Sequence | None = None  # on decode
    run: sequences.Sequence | None = None  # on prefill
    offered: int = 0  # earlier positions were read by decode
    is_read: bool = False  # an offer is in flight
    num_heard: int = 0  # tokens of the session's answer received so far
    first_at: float = 0.0


class TimedRouter(Router):
    """The real router; measures its CPU time."""

    num_choices = 0
    choosing_s = 0.0

    def choose(self, workers: Sequence[WorkerView], request: Request) -> Placement | Wait | Held | Unready:
        began = time.thread_time()
        choice = super().choose(workers, request)
        self.choosing_s += time.thread_time() - began
        self.num_choices += 1
        return choice


class SimGateway:
    """One gateway and its requests."""

    def __init__(self, clock: Clock, wires: Wires, local_prefill_max_tokens: int, uses_cache: bool) -> None:
        self.router = TimedRouter(local_prefill_max_tokens, uses_cache)
        self._clock = clock
        self._wires = wires
        self._workers: dict[WorkerState, SimWorker] = {}
        self._is_polling = False
        self._lives: dict[Waiter, Life] = {}
        self._by_session: dict[tuple[str, int], Life] = {}  # (stream, handle) |-> the session's request
        self._read_ends: dict[WorkerState, float] = {}  # end of the last read requested so far

    def connect(self, prefills: Sequence[SimWorker], decodes: Sequence[SimWorker]) -> None:
        """Call first."""
        for number, worker in enumerate(prefills):
            self._workers[WorkerState("prefill", f"prefill-{number}", FOR_EVER, FOR_EVER)] = worker
        for number, worker in enumerate(decodes):
            state = DecodeState(f"decode-{number}", FOR_EVER, FOR_EVER)
            state.open_stream(state.address, state.address)
            state.on_unwanted = partial(self._abort, state)
            self._workers[state] = worker
        self._queue = Queue(list(self._workers), self.router, 1, 0.0)
        self._queue.on_change = self._pump
        for one in self._workers:
            one.on_change = self._pump

    def poll(self) -> None:
        """Poll all workers for their free room, at the same moment, now and periodically."""
        self._is_polling = True
        for state, worker in self._workers.items():
            state.learn(_status_of(state, worker), self._clock.now)
        self._is_polling = False
        self._pump()
        self._clock.after(POLL_S, self.poll)

    def submit(self, generation: Generation, on_end: Callable[[Life], None]) -> None:
        self._enqueue(Life(Request(generation, FOR_EVER, FOR_EVER, self._clock.now), on_end))

    # -- attempts: what the queue and the machine decide ---------------------------------------------------------

    def _enqueue(self, life: Life) -> None:
        life.attempt = life.session = life.run = None
        self._lives[self._queue.join(life.request)] = life
        self._pump()

    def _pump(self) -> None:
        if self._is_polling:
            return
        for waiter in self._queue.decide(self._clock.now):
            self._clock.after(0.0, partial(self._begin, waiter))

    def _begin(self, waiter: Waiter) -> None:
        life = self._lives.pop(waiter)
        attempt = life.attempt = AttemptState(self._queue, waiter)
        attempt.session.on_event = lambda: self._read_inbox(life, attempt)
        life.num_heard = 0
        self._by_session[attempt.session.stream, attempt.session.handle] = life
        self._call(self._reserve, life, attempt, attempt.begin(self._clock.now))

    def _call(self, verb: Callable[..., None], *arguments: object) -> None:
        """Send a message."""
        self._clock.after(self._wires.call_s, lambda: verb(*arguments))

    def _read_inbox(self, life: Life, attempt: AttemptState) -> None:
        while attempt.request.phase is Phase.RUNNING and (event := attempt.next_event(self._clock.now)) is not None:
            self._step(life, attempt, update_of(event) if isinstance(event, decode_pb2.SessionDelta) else event)

    def _step(self, life: Life, attempt: AttemptState, event: Event) -> None:
        if life.attempt is not attempt:  # it has ended meanwhile
            return
        for command in attempt.step(event, self._clock.now):
            if isinstance(command, Tokens):
                life.first_at = life.first_at or self._clock.now
            else:
                self._call(self._prefill, life, attempt, command)
        if not attempt.is_open:
            self._leave(life, attempt)

    def _leave(self, life: Life, attempt: AttemptState) -> None:
        del self._by_session[attempt.session.stream, attempt.session.handle]
        if life.run is not None and life.run.is_kept:  # its last acknowledgement is still in flight
            with self._prefill_worker(attempt).changing() as scheduler:
                scheduler.end(life.run)
        attempt.close()
        if life.request.phase is Phase.ENDED:
            life.on_end(life)
        else:
            self._enqueue(life)

    def _abort(self, state: DecodeState) -> None:
        with self._workers[state].changing() as scheduler:
            scheduler.abort(state.stream, state.take_unwanted())

    def _decode_worker(self, attempt: AttemptState) -> SimWorker:
        return self._workers[attempt.places.decode]

    def _prefill_worker(self, attempt: AttemptState) -> SimWorker:
        assert attempt.places.prefill is not None
        return self._workers[attempt.places.prefill]

    # -- sessions ------------------------------------------------------------------------------------------------

    def _reserve(self, life: Life, attempt: AttemptState, request: decode_pb2.ReserveRequest) -> None:
        params = SequenceParams(
            request.request_id, request.prompt, life.request.num_missing, request.max_tokens,
            local_prefill_max_tokens=request.local_prefill_max_tokens, gateway=request.gateway, handle=request.handle,
            attempt=request.attempt, num_emitted=request.num_emitted,
        )  # fmt: skip
        found = _admit(self._decode_worker(attempt), "decode", life.request, params, self._clock.now)
        if isinstance(found, sequences.Sequence):
            life.session = found
            ticket = kv_pb2.Ticket(begin=found.num_cached, end=params.end)
            is_receiving = found.phase is sequences.Phase.RECEIVING
            self._call(self._step, life, attempt, decode_pb2.ReserveResponse(ticket=ticket, needs_prefill=is_receiving))
        else:
            self._call(self._step, life, attempt, found)

    def take_updates(self, updates: Sequence[Update]) -> None:
        """Handle a decode worker's step with first or last tokens."""
        for update in updates:
            params = update.sequence.params
            life = self._by_session.get((params.gateway, params.handle))
            if life is not None and life.attempt is not None:
                num_tokens = len(update.sequence.tokens) - params.num_prompt
                delta = decode_pb2.SessionDelta(
                    handle=params.handle, attempt=params.attempt, token_ids=bytes(num_tokens - life.num_heard),
                    finish_reason=update.finish_reason, error=update.error,
                )  # fmt: skip
                life.num_heard = num_tokens
                self._call(self._deliver, life.attempt.places.decode, delta)

    def _deliver(self, state: DecodeState, delta: decode_pb2.SessionDelta) -> None:
        state.deliver(delta, self._clock.now)

    # -- hand-offs -----------------------------------------------------------------------------------------------

    def _prefill(self, life: Life, attempt: AttemptState, request: prefill_pb2.RunRequest) -> None:
        session = attempt.session
        params = SequenceParams(
            request.request_id, request.prompt, request.ticket.end, gateway=session.stream, handle=session.handle
        )  # fmt: skip
        found = _admit(self._prefill_worker(attempt), "prefill", life.request, params, self._clock.now)
        if isinstance(found, sequences.Sequence):
            life.run, life.offered, life.is_read = found, request.ticket.begin, False
            self._offer(life, attempt)
        else:
            self._call(self._end_prefill, life, attempt, found)

    def take_prefill_updates(self, updates: Sequence[Update]) -> None:
        """Handle a prefill worker's step that computed more of prompts."""
        for update in updates:
            params = update.sequence.params
            life = self._by_session[params.gateway, params.handle]
            assert life.attempt is not None
            self._offer(life, life.attempt)

    def _offer(self, life: Life, attempt: AttemptState) -> None:
        """Offer what is ready, one offer at a time; the last acknowledgement ends the run."""
        if life.attempt is not attempt or life.run is None or life.is_read or not life.run.is_kept:
            return
        worker = self._prefill_worker(attempt)
        positions = worker.scheduler.next_offer(life.run, life.offered)
        if positions is not None:
            life.is_read = True
            self._call(self._read, life, attempt, positions)
        elif life.offered == life.run.params.end:
            with worker.changing() as scheduler:
                scheduler.end(life.run)
            self._call(self._end_prefill, life, attempt, Prefilled())

    def _end_prefill(self, life: Life, attempt: AttemptState, event: Prefilled | Refused) -> None:
        if life.attempt is attempt:
            attempt.take_prefill(event)

    def _read(self, life: Life, attempt: AttemptState, positions: range) -> None:
        assert life.session is not None and life.run is not None
        num_pages = len(self._prefill_worker(attempt).scheduler.pages_of(life.run, positions))
        session, state = life.session, attempt.places.decode
        scheduler = self._decode_worker(attempt).scheduler
        scheduler.begin_read(session.id, session.params.attempt, positions.start, positions.stop, num_pages)
        begin = max(self._read_ends.get(state, 0.0), self._clock.now)
        self._read_ends[state] = begin + len(positions) * self._wires.token_s
        self._clock.at(self._read_ends[state], lambda: self._finish_read(life, attempt, positions))

    def _finish_read(self, life: Life, attempt: AttemptState, positions: range) -> None:
        assert life.session is not None
        worker = self._decode_worker(attempt)
        is_last = positions.stop == life.session.params.end
        with worker.changing() if is_last else nullcontext(worker.scheduler) as scheduler:
            scheduler.finish_read(life.session.id, positions.stop, self._clock.now)
        life.offered, life.is_read = positions.stop, False
        self._call(self._offer, life, attempt)


def _admit(
    worker: SimWorker, role: Role, request: Request, params: SequenceParams, now: float
) -> sequences.Sequence | Refused:
    """As a worker does."""
    keys = list(request.page_keys(MODEL, worker.scheduler.page_tokens))  # equal to the worker's own
    try:
        with worker.changing() as scheduler:
            return scheduler.admit(params, now, role == "prefill", keys)
    except NoRoomError as error:
        return Refused(role, "no room", str(error))
    except NeverFitsError as error:
        return Refused(role, "invalid", str(error))


def _status_of(state: WorkerState, worker: SimWorker) -> decode_pb2.WorkerStatus:
    worker.settle()
    scheduler = worker.scheduler
    layout = kv_pb2.KvLayout(weights=MODEL, page_tokens=scheduler.page_tokens)
    peer = kv_pb2.Peer(incarnation=state.address, layout=layout, num_pages=scheduler.cache.num_pages)
    return decode_pb2.WorkerStatus(peer=peer, max_running=scheduler.max_running, free_pages=scheduler.cache.num_spare)


def cached_tokens(life: Life) -> int:
    """Prompt tokens that the last attempt found cached."""
    parts: list[sequences.Sequence | None] = [life.session, life.run]
    return max(part.num_cached for part in parts if part is not None)
