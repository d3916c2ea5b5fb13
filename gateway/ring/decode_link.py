"""A decode worker as this gateway sees it: sessions are opened here, and their news arrives on one stream.

Lives on the asyncio thread.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import structlog

from gateway.ring.worker_link import RETRY_S, LinkOptions, WorkerLink
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2
from runtime.rpc import new_incarnation

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Lost:
    """The session's worker, or the way to it, is gone."""

    reason: str


News = decode_pb2.SessionDelta | prefill_pb2.RunResponse | Lost | Exception  # an exception: what ended the prefill


@dataclass(slots=True, eq=False)
class RemoteSession:
    """The gateway's end of one session on a decode worker."""

    handle: int
    stream: str  # name of the Steps stream that tells its news
    incarnation: str  # of the worker behind that stream
    silent_since: float  # when its client last got tokens
    inbox: asyncio.Queue[News] = field(default_factory=asyncio.Queue)  # as long as the answer, at most
    is_over: bool = False  # its last news has come: nothing is left to abort
    on_over: Callable[[], None] = lambda: None  # called when nothing of it is left on the worker


class DecodeLink(WorkerLink):
    """A decode worker: sessions are opened here, and their news arrives on one stream."""

    role = "decode"
    stub_type = decode_pb2_grpc.DecodeStub
    _stub: decode_pb2_grpc.DecodeStub

    def __init__(self, address: str, options: LinkOptions) -> None:
        super().__init__(address, options)
        self._handles = itertools.count(1)
        self._sessions: dict[int, RemoteSession] = {}  # handle |-> session
        self._stream = ""  # name of the open Steps stream; empty while there is none
        self._incarnation = ""  # of the worker behind it
        self._unwanted: list[int] = []  # handles to abort
        self._has_unwanted = asyncio.Event()
        self._aborting = asyncio.Lock()  # held while the worker is told

    def start(self) -> None:
        super().start()
        self._spawn(self._listen())
        self._spawn(self._abort_unwanted())

    @property
    def incarnation(self) -> str:
        """A worker that came back may open its stream before it tells its status."""
        return self._incarnation

    def find_trouble(self) -> str | None:
        trouble = super().find_trouble()
        if trouble is None and not self._stream:
            return "has no open stream of tokens"
        return trouble

    def _judge(self) -> None:
        stall = self.find_stall()  # one that drains finishes what it has
        if stall is not None:
            self._lose_all(f"{self.address} {stall}")

    async def _listen(self) -> None:
        """Keep one Steps stream open; each has a new name, so news of an old one cannot be taken for another's."""
        while True:
            name = new_incarnation()
            reason = "closed its stream"
            try:
                async for events in self._stub.Steps(decode_pb2.StepsRequest(gateway=name)):
                    if self._stream != name:
                        self._stream, self._incarnation = name, events.incarnation
                        self._on_change()
                    for delta in events.deltas:
                        self._deliver(delta)
            except grpc.aio.AioRpcError as error:
                reason = f"broke its stream ({error.code().name})"
            self._stream = ""
            self._lose_all(f"{self.address} {reason}")
            self._on_change()
            await asyncio.sleep(RETRY_S)

    def _deliver(self, delta: decode_pb2.SessionDelta) -> None:
        session = self._sessions.get(delta.handle)
        if session is None:
            if not delta.finish_reason:
                self._abort(delta.handle)
            return
        session.silent_since = time.monotonic()
        session.inbox.put_nowait(delta)
        if delta.finish_reason:
            session.is_over = True
            session.on_over()

    def _lose_all(self, reason: str) -> None:
        """Tell every open session that it will hear no more; who has been silent for longest goes on first."""
        for session in sorted(self._sessions.values(), key=lambda session: session.silent_since):
            session.inbox.put_nowait(Lost(reason))
            if session.stream != self._stream:  # the worker ends its sessions with their stream
                session.on_over()

    @contextmanager
    def open_session(self, silent_since: float) -> Iterator[RemoteSession]:
        """A handle for one session. At the end, whatever is left of it on the worker is aborted."""
        session = RemoteSession(next(self._handles), self._stream, self._incarnation, silent_since)
        self._sessions[session.handle] = session
        try:
            yield session
        finally:
            del self._sessions[session.handle]
            if not session.is_over and session.stream == self._stream:
                self._abort(session.handle)

    async def reserve(self, request: decode_pb2.ReserveRequest, timeout_s: float) -> decode_pb2.ReserveResponse:
        """Raises grpc.aio.AioRpcError. A worker that is alive answers within a heartbeat.

        The worker first hears of the sessions that made room for this one.
        """
        await self._send_aborts()
        timeout_s = min(timeout_s, self._heartbeat_s)
        try:
            response: decode_pb2.ReserveResponse = await self._stub.Reserve(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            self.doubt(error)
            raise
        return response

    def _abort(self, handle: int) -> None:
        self._unwanted.append(handle)
        self._has_unwanted.set()

    async def _abort_unwanted(self) -> None:
        while True:
            await self._has_unwanted.wait()
            await self._send_aborts()

    async def _send_aborts(self) -> None:
        """Tell the worker, many handles at a time. Should that fail, the end of the stream or their next news does."""
        async with self._aborting:
            self._has_unwanted.clear()
            handles, self._unwanted = self._unwanted, []
            if not handles:
                return
            request = decode_pb2.AbortRequest(gateway=self._stream, handles=handles)
            try:
                await self._stub.Abort(request, timeout=self._heartbeat_s)
            except asyncio.CancelledError:  # of a request that waited for this; the others' sessions must still end
                self._unwanted += handles
                self._has_unwanted.set()
                raise
            except grpc.aio.AioRpcError as error:
                log.warning("abort failed", address=self.address, code=error.code().name)
