"""A decode worker and this gateway's sessions there: where each token goes, what ends a session. Pure.

One session's life:

    open ──Reserve──► tokens arrive in `inbox` ──last update──► over: nothing of it is left on the worker
      │                        └── its stream ends, the worker stalls ──► SessionLost in `inbox`
      └── closed before it is over, and its stream is still open ──► its handle is to be aborted
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.ring.request_steps import Prefilled, Refused, SessionLost
from gateway.ring.worker_state import WorkerState
from protos import decode_pb2

SessionEvent = decode_pb2.SessionDelta | Prefilled | Refused | SessionLost


@dataclass(slots=True, eq=False)
class Session:
    """The gateway's end of one session on a decode worker."""

    handle: int
    stream: str  # name of the Steps stream that reports it
    incarnation: str  # of the worker behind that stream
    silent_since: float  # when its client last got tokens
    inbox: deque[SessionEvent] = field(default_factory=deque)  # not read by the request; as long as the answer, at most
    is_over: bool = False  # its last update has come: nothing is left to abort
    on_over: Callable[[], None] = lambda: None  # called when nothing of it is left on the worker
    on_event: Callable[[], None] = lambda: None  # called when the inbox got something

    def put(self, event: SessionEvent) -> None:
        self.inbox.append(event)
        self.on_event()


class DecodeState(WorkerState):
    """One decode worker, its stream of tokens and the sessions on it."""

    def __init__(self, address: str, heartbeat_s: float, stall_s: float, source: str = "") -> None:
        super().__init__("decode", address, heartbeat_s, stall_s, source)
        self.sessions: dict[int, Session] = {}  # handle |-> session
        self.stream = ""  # name of the open Steps stream; empty while there is none
        self.on_unwanted: Callable[[], None] = lambda: None  # called when there are handles to abort
        self._stream_incarnation = ""  # of the worker behind the stream
        self._handles = itertools.count(1)
        self._unwanted: list[int] = []  # handles to abort

    @property
    def incarnation(self) -> str:
        """A worker that came back may open its stream before it answers a poll."""
        return self._stream_incarnation

    def find_trouble(self, now: float) -> str | None:
        trouble = super().find_trouble(now)
        if trouble is None and not self.stream:
            return "has no open stream of tokens"
        return trouble

    def _judge(self, now: float) -> None:
        silence, stall = self.find_silence(now), self.find_stall(now)  # a draining worker finishes what it has
        if stall is not None:
            self._lose_all(f"{self.address} {stall}", is_stuck=silence is None)

    def open_stream(self, name: str, incarnation: str) -> None:
        """Each stream has a new name, so no update of an old one can be taken for another's."""
        self.stream, self._stream_incarnation = name, incarnation
        self.on_change()

    def close_stream(self, detail: str) -> None:
        """The worker ends the sessions of a stream with it."""
        self.stream = ""
        self._lose_all(f"{self.address} {detail}")
        self.on_change()

    def deliver(self, delta: decode_pb2.SessionDelta, now: float) -> None:
        session = self.sessions.get(delta.handle)
        is_last = bool(delta.finish_reason)
        if session is None:
            if not is_last:
                self.abort([delta.handle])
            return
        session.silent_since = now
        if is_last:
            session.is_over = True
            session.on_over()
        session.put(delta)

    def _lose_all(self, detail: str, is_stuck: bool = False) -> None:
        """No open session gets any more; the one that has been silent for longest goes on first."""
        for session in sorted(self.sessions.values(), key=lambda session: session.silent_since):
            if session.stream != self.stream:
                session.on_over()
            session.put(SessionLost(detail, is_stuck))

    def open_session(self, silent_since: float) -> Session:
        session = Session(next(self._handles), self.stream, self._stream_incarnation, silent_since)
        self.sessions[session.handle] = session
        return session

    def close_session(self, session: Session) -> None:
        """Whatever is left of it on the worker is to be aborted."""
        del self.sessions[session.handle]
        if not session.is_over and session.stream == self.stream:
            self.abort([session.handle])

    def take_unwanted(self) -> list[int]:
        """Handles on the open stream to abort now. Should that fail, the stream's end or their next update helps."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def abort(self, handles: list[int]) -> None:
        """These sessions are to end on the worker."""
        self._unwanted += handles
        self.on_unwanted()
