"""One try of a request that has places: what it holds, and what it does with each event. Pure.

The request's machine decides; here its decisions are applied to places, sessions and the router's memory. What remains
to be done by the caller are calls of workers, and tokens for the client.
"""

from dataclasses import dataclass, field

from gateway.ring.attempt_record import AttemptRecord, WorkerName
from gateway.ring.decode_state import Session, SessionEvent
from gateway.ring.generation import Tokens
from gateway.ring.queue import Places, Queue, Waiter
from gateway.ring.reasons import OUT_OF_TIME, Reason
from gateway.ring.request_machine import Phase, Request
from gateway.ring.request_steps import (
    EndAttempt,
    Event,
    Forget,
    GiveBack,
    Placed,
    Prefilled,
    Refused,
    Remember,
    SessionLost,
    SessionUpdate,
)
from protos import decode_pb2, prefill_pb2

Command = prefill_pb2.RunRequest | Tokens


@dataclass(slots=True)
class AttemptState:
    """From its places to its end; `close` leaves nothing of it behind here, and soon nothing on the workers."""

    queue: Queue
    waiter: Waiter
    record: AttemptRecord | None = None  # for a trace, if there is to be one
    session: Session = field(init=False)
    end: EndAttempt | None = None  # how it ended; None before

    def __post_init__(self) -> None:
        self.session = self.places.decode.open_session(self.request.silent_since)
        self.session.on_over = lambda: self.places.release(self.places.decode)  # however slowly its client reads

    @property
    def request(self) -> Request:
        return self.waiter.request

    @property
    def places(self) -> Places:
        assert self.waiter.places is not None
        return self.waiter.places

    @property
    def is_open(self) -> bool:
        """Whether it goes on: afterwards the request waits again or has ended."""
        return self.request.phase in (Phase.RESERVING, Phase.RUNNING)

    def begin(self, now: float) -> decode_pb2.ReserveRequest:
        """What to ask of the decode worker; `step` takes the answer."""
        places, session = self.places, self.session
        placed = Placed(
            session.incarnation,
            places.prefill.incarnation if places.prefill else None,
            places.placement.local_prefill_max_tokens,
            places.decode.address,
            session.stream,
            session.handle,
            places.placement.why,
        )
        if self.record is not None:
            prefill = WorkerName(places.prefill.address, places.prefill.incarnation) if places.prefill else None
            self.record.place(WorkerName(placed.address, placed.decode), prefill, now)
        (reserve,) = self.request.step(placed, now)
        assert isinstance(reserve, decode_pb2.ReserveRequest)
        return reserve

    def take_prefill(self, event: Prefilled | Refused) -> None:
        """The prefill worker's answer. Its place is free at once, however slowly the client reads."""
        if isinstance(event, Prefilled) and self.places.prefill is not None:
            self.places.release(self.places.prefill)
        self.session.put(event)

    def next_event(self, now: float) -> SessionEvent | Reason | None:
        """The next thing to `step` with; None: wait for one. Only while the request runs.

        After the deadline what has arrived counts only if it is all of the answer: its reader may be slow.
        """
        if self.session.inbox and (now < self.request.deadline or self.session.is_over):
            return self.session.inbox.popleft()
        return OUT_OF_TIME if now >= self.request.deadline else None

    def step(self, event: Event, now: float) -> list[Command]:
        """What the caller has to do: at most one call of prefill, and at most one Tokens."""
        commands: list[Command] = []
        if isinstance(event, SessionUpdate) and event.finish_reason == "expired":
            event = self._blame(event)
        if self.record is not None:
            _note(self.record, event, now)
        for action in self.request.step(event, now):
            match action:
                case prefill_pb2.RunRequest() | Tokens():
                    commands.append(action)
                case GiveBack(role, is_refused):
                    worker = self.places.prefill if role == "prefill" else self.places.decode
                    assert worker is not None
                    self.places.release(worker, now if is_refused else None)
                case Remember(role):
                    self.queue.remember(self.places, self.request, role)
                case Forget(num_cached):
                    self.queue.router.correct(self.places.placement.decode, self.request, num_cached)
                case EndAttempt():
                    self.end = action
                    if self.record is not None:
                        self.record.close(now, action.reason, action.is_failure)
        return commands

    def _blame(self, expired: SessionUpdate) -> Event:
        """The decode worker got no KV in time: name the prefill worker if that is stuck."""
        prefill = self.places.prefill
        stuck = prefill.find_stuck() if prefill is not None else None
        return SessionLost(f"{prefill.address} {stuck}", True, "prefill") if prefill and stuck else expired

    def close(self) -> None:
        """Give back and abort all that it still holds."""
        self.places.decode.close_session(self.session)
        self.queue.leave(self.waiter)


def _note(record: AttemptRecord, event: Event, now: float) -> None:
    match event:
        case decode_pb2.ReserveResponse():
            record.reserve(event.needs_prefill, event.ticket.begin, now)
        case Prefilled():
            record.finish_prefill(event.timing, now)
        case SessionUpdate():
            record.add_tokens(len(event.token_ids), event.timing if event.finish_reason else None, now)
