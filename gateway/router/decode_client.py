"""A decode worker, its stream of tokens and this gateway's sessions there. Lives on the asyncio thread.

One session's life:

    open ──Reserve──► tokens arrive in `inbox` ──last update──► over: nothing of it is left on the worker
      │                        └── its stream ends, the worker stalls ──► AttemptFailed in `inbox`
      └── closed before it is over, and its stream is still open ──► its handle is to be aborted
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import grpc
import structlog

from gateway.router.request import AttemptFailed
from gateway.router.worker_client import RETRY_S, WorkerClient
from gateway.router.worker_view import Role
from protos import decode_pb2, decode_pb2_grpc
from runtime.malformed import BrokenAnswerError
from runtime.rpc import new_incarnation
from wire.logprobs import TokenLogprobs
from wire.timing import Timing

log = structlog.get_logger()


class Prefilled(NamedTuple):
    """An event of a session: the prefill worker has handed over all KV."""

    timing: Timing  # the prefill worker's part
    prompt_logprobs: Sequence[TokenLogprobs]  # of all prompt tokens but the first, when asked for


SessionEvent = decode_pb2.SessionDelta | Prefilled | Exception


class Session:
    """The gateway's end of one session on a decode worker."""

    def __init__(
        self, handle: int, attempt: int, stream: str, silent_since: float, on_over: Callable[[], None] = lambda: None
    ) -> None:
        """`stream`: name of the Steps stream that reports it. `silent_since`: when its client last got tokens.

        `on_over`: called when nothing of it is left on the worker.
        """
        self.handle = handle
        self.attempt = attempt
        self.stream = stream
        self.silent_since = silent_since
        self.inbox: deque[SessionEvent] = deque()  # not read by the request; as long as the answer, at most
        self.is_over = False  # its last update has come: nothing is left to abort
        self.on_over = on_over
        self._woken: asyncio.Future[None] | None = None  # while the request waits

    def put(self, event: SessionEvent) -> None:
        self.inbox.append(event)
        self.wake()

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def wait(self) -> None:
        """Wait until `put` or `wake` is called."""
        self._woken = asyncio.get_running_loop().create_future()
        await self._woken


class DecodeClient(WorkerClient):
    """A decode worker."""

    role: Role = "decode"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stub = decode_pb2_grpc.DecodeStub(self._channel)
        self._sessions: dict[int, Session] = {}  # handle |-> session
        self._stream = ""  # name of the open Steps stream; empty while there is none
        self._stream_incarnation = ""  # of the worker behind the stream
        self._handles = itertools.count(1)
        self._unwanted: list[int] = []  # handles to abort
        self._has_unwanted = asyncio.Event()
        self._aborting = asyncio.Lock()  # held during an Abort call

    @property
    def incarnation(self) -> str:
        """A worker that came back may open its stream before it answers a poll."""
        return self._stream_incarnation

    def find_trouble(self) -> str | None:
        trouble = super().find_trouble()
        if trouble is None and not self._stream:
            return "has no open stream of tokens"
        if trouble is None and self._stream_incarnation != self.status.peer.incarnation:
            return "has restarted, and not said yet what it serves"
        return trouble

    def _judge(self) -> None:
        silence, stall = self.find_silence(), self.find_stall()  # a draining worker finishes what it has
        if stall is not None:
            self._lose_all(f"{self.address} {stall}", is_stuck=silence is None)

    def start(self) -> None:
        super().start()
        self._keep(self._listen)
        self._keep(self._abort_unwanted)

    # -- its stream --------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Keep one Steps stream open. Each has a new name, so no update of an old one can be taken for another's."""
        if self._stream:  # this has failed, and runs again
            self._end_stream("broke its stream")
        while True:
            detail = "closed its stream"
            try:
                await self._follow(new_incarnation())
                self.status.draining = True  # it ends, and lends a little longer; its next answer says so, too
            except BrokenAnswerError as error:
                detail = f"broke its stream ({error.details()})"
            except grpc.aio.AioRpcError as error:
                detail = f"broke its stream ({error.code().name})"
            self._end_stream(detail)
            await asyncio.sleep(RETRY_S)

    def _end_stream(self, detail: str) -> None:
        """Note the end of the stream, with which the worker ends its sessions."""
        self._stream = ""
        self._lose_all(f"{self.address} {detail}")
        self._mark()

    async def _follow(self, name: str) -> None:
        """Deliver what the stream `name` brings until it ends. Raises grpc.aio.AioRpcError."""
        async with aclosing(aiter(self._stub.Steps(decode_pb2.StepsRequest(gateway=name)))) as stream:
            async for events in stream:
                if self._stream != name:
                    self._stream, self._stream_incarnation = name, events.incarnation
                    self._poll_soon()  # it may have restarted with another model
                    self._mark()
                now = self._clock()
                for delta in events.deltas:
                    self._deliver(delta, now)

    def _deliver(self, delta: decode_pb2.SessionDelta, now: float) -> None:
        session = self._sessions.get(delta.handle)
        is_last = bool(delta.finish_reason)
        if session is None:
            if not is_last:
                self._abort([delta.handle])
            return
        session.silent_since = now
        if is_last:
            session.is_over = True
            session.on_over()
        if delta.attempt == session.attempt:
            session.put(delta)

    def _lose_all(self, detail: str, is_stuck: bool = False) -> None:
        """Fail all open sessions; the one that has been silent for longest goes on first."""
        for session in sorted(self._sessions.values(), key=lambda session: session.silent_since):
            if session.stream != self._stream:
                session.on_over()
            session.put(AttemptFailed("lost", detail, is_stuck=is_stuck))

    # -- sessions ----------------------------------------------------------------------------------------------------

    def open_session(self, attempt: int, silent_since: float, on_over: Callable[[], None]) -> Session:
        """Make a session; `reserve` opens it on the worker. `on_over`: as in Session."""
        session = Session(next(self._handles), attempt, self._stream, silent_since, on_over)
        self._sessions[session.handle] = session
        return session

    def close_session(self, session: Session) -> None:
        """Whatever is left of it on the worker is to be aborted."""
        del self._sessions[session.handle]
        if not session.is_over and session.stream == self._stream:
            self._abort([session.handle])

    async def reserve(self, request: decode_pb2.ReserveRequest, timeout_s: float) -> decode_pb2.ReserveResponse:
        """Raises grpc.aio.AioRpcError. A worker that is alive answers within a heartbeat.

        The worker first gets the aborts of the sessions that made room for this one.
        """
        ends_at = self._clock() + timeout_s
        await self._send_aborts()
        remaining_s = max(min(ends_at - self._clock(), self.find_patience()), 0.001)
        with self._doubting():
            response: decode_pb2.ReserveResponse = await self._stub.Reserve(request, timeout=remaining_s)
        return response

    def _abort(self, handles: list[int]) -> None:
        self._unwanted += handles
        self._has_unwanted.set()

    async def _abort_unwanted(self) -> None:
        while True:
            await self._has_unwanted.wait()
            await self._send_aborts()

    async def _send_aborts(self) -> None:
        """Many handles at a time. Should that fail, the stream's end or their next update helps."""
        async with self._aborting:
            self._has_unwanted.clear()
            handles, self._unwanted = self._unwanted, []
            if not handles:
                return
            request = decode_pb2.AbortRequest(gateway=self._stream, handles=handles)
            try:
                await self._stub.Abort(request, timeout=max(self.find_patience(), 0.001))
            except asyncio.CancelledError:  # of a request that waited for this; the other sessions must still end
                self._abort(handles)
                raise
            except grpc.aio.AioRpcError as error:
                log.warning("abort failed", address=self.address, code=error.code().name)
