"""Workers without engines: the real gRPC services, scripted by a test that also plays the gateway.

A fake's tokens name their positions, so a lost, repeated or reordered token shows in the answer. A fake remembers all
it computed, like an unlimited prefix cache, until the test clears it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np

from protos import decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime.rpc import bind, build_server
from wire.messages import pack_tokens, unpack_tokens
from wire.page_keys import TOKEN_BYTES

PAGE_TOKENS = 16
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES
NUM_PAGES = 1000
PATIENCE_S = 30.0  # longer than any wait takes; a test that reaches it fails
Refusal = tuple[grpc.StatusCode, str] | tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]  # the last: metadata
Context = grpc.aio.ServicerContext[Any, Any]


def token_at(position: int) -> int:
    return 1000 + position


class Signal:
    """Lets a test wait for a condition without polling: code that may have made it true calls `fire`."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                await waiter


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """What both roles have in common."""

    def __init__(self, role: str, incarnation: str, signal: Signal, max_running: int = 4) -> None:
        self.incarnation = incarnation
        self.signal = signal
        self.refusals: deque[Refusal] = deque()  # of the next Reserve or Run calls
        self.num_status_calls = 0
        self.calls: list[str] = []  # names of the Reserve and Abort calls
        self.status: dict[str, Any] = {}  # fields of its status that are not as usual
        self.max_loras = 0
        self.folders: dict[str, str] = {}  # path |-> digest of the adapter that it sees there
        self.adapters: dict[str, str] = {}  # digest |-> name of those loaded
        self.load_refusal: Refusal | None = None  # of LoadAdapter calls
        self.cached: set[tuple[str, bytes]] = set()  # (salt, a page's tokens and all before them)
        self._max_running = max_running
        layout = kv_pb2.KvLayout(weights="w", page_tokens=PAGE_TOKENS)
        self.peer = kv_pb2.Peer(role=role, incarnation=incarnation, layout=layout, num_pages=NUM_PAGES)

    async def Status(self, request: worker_pb2.StatusRequest, context: Context) -> worker_pb2.WorkerStatus:
        self.num_status_calls += 1
        self.signal.fire()
        usual: dict[str, Any] = {"peer": self.peer, "max_running": self._max_running, "num_running": self.num_running}
        usual |= {"adapters": self.adapters, "max_loras": self.max_loras}
        return worker_pb2.WorkerStatus(**usual | self.status)

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Context
    ) -> worker_pb2.LoadAdapterResponse:
        self.calls.append(f"Load {request.name}")
        if self.load_refusal:
            await context.abort(*self.load_refusal)
        digest = self.folders.get(request.path, "")
        if not digest or request.digest not in ("", digest):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.path} has the digest {digest}")
        self.adapters[digest] = request.name
        return worker_pb2.LoadAdapterResponse(digest=digest)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_pb2.UnloadAdapterResponse:
        self.calls.append(f"Unload {request.digest}")
        self.adapters.pop(request.digest, None)
        return worker_pb2.UnloadAdapterResponse()

    async def Pause(self, request: worker_pb2.PauseRequest, context: Context) -> worker_pb2.PauseResponse:
        self.calls.append(f"Pause {request.for_s:g}{' ends' * request.ends}")
        self.status["pause"] = "is paused" if request.for_s else ""
        return worker_pb2.PauseResponse(num_left=self.num_running)

    async def SetWeights(
        self, request: worker_pb2.SetWeightsRequest, context: Context
    ) -> worker_pb2.SetWeightsResponse:
        """`folders`: path |-> fingerprint there."""
        self.calls.append(f"Set {request.weights}" if request.weights else "Look")
        found = self.folders.get(request.path, "")
        if not found or self.load_refusal:
            await context.abort(*(self.load_refusal or (grpc.StatusCode.INVALID_ARGUMENT, "no model is there")))
        if request.weights:
            self.peer.layout.weights = found
        return worker_pb2.SetWeightsResponse(weights=found)

    @property
    def num_running(self) -> int:
        return 0

    def keep(self, tokens: bytes, salt: str) -> None:
        """Mark the KV of these tokens as cached here."""
        self.cached |= {(salt, tokens[:end]) for end in range(PAGE_BYTES, len(tokens) + 1, PAGE_BYTES)}

    def find_cached(self, prompt: bytes, salt: str) -> int:
        """Number of leading positions, excluding the prompt's last, with KV cached here."""
        num_pages, end = 0, len(prompt) - TOKEN_BYTES
        while (num_pages + 1) * PAGE_BYTES <= end and (salt, prompt[: (num_pages + 1) * PAGE_BYTES]) in self.cached:
            num_pages += 1
        return num_pages * PAGE_TOKENS

    async def refuse_next(self, context: Context) -> None:
        if self.refusals:
            await context.abort(*self.refusals.popleft())

    def add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError


class FakeSession:
    """One reservation at a fake decode worker."""

    def __init__(self, worker: "FakeDecode", request: decode_pb2.ReserveRequest) -> None:
        self.request = request
        self.needs_prefill = True
        self.is_over = False
        self.prompt_ids: list[int] = unpack_tokens(request.prompt).tolist()
        self._worker = worker
        self._tokens = request.prompt
        self._position = len(self.prompt_ids)

    def emit(self, count: int, finish: str = "", error: str = "") -> None:
        """Send the next `count` tokens in one message."""
        tokens = [token_at(self._position + offset) for offset in range(count)]
        self._position += count
        self.say(tokens, finish, error)

    def say(self, tokens: list[int], finish: str = "", error: str = "", **more: Any) -> None:
        """Send one message. `more`: further fields."""
        self.is_over = bool(finish)
        self._tokens += pack_tokens(np.array(tokens, np.int32))
        self._worker.keep(self._tokens[:-TOKEN_BYTES], self.request.cache_salt)
        delta = decode_pb2.SessionDelta(
            handle=self.request.handle,
            attempt=self.request.attempt,
            token_ids=tokens,
            finish_reason=finish,
            error=error,
            **more,
        )
        stream = self._worker.streams.get(self.request.gateway)
        if stream is not None:
            stream.put_nowait(decode_pb2.StepEvents(deltas=[delta]))


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """Answers a reservation with all its tokens at once, or leaves that to the test."""

    def __init__(self, incarnation: str, signal: Signal, max_running: int = 4, is_manual: bool = False) -> None:
        super().__init__("decode", incarnation, signal, max_running)
        self.is_manual = is_manual  # the test emits the tokens
        self.needs_prefill = True
        self.num_cached: int | None = None  # cached tokens it reports for each prompt; None: those it remembers
        self.may_answer = asyncio.Event()  # Reserve answers, or refuses, once this is set
        self.may_answer.set()
        self.sessions: list[FakeSession] = []
        self.aborted: set[int] = set()  # handles
        self.streams: dict[str, asyncio.Queue[decode_pb2.StepEvents | None]] = {}  # gateway |-> its messages to come

    @property
    def num_running(self) -> int:
        return sum(not session.is_over for session in self.sessions)

    async def has_sessions(self, count: int) -> None:
        await self.signal.until(lambda: len(self.sessions) == count)

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Context) -> decode_pb2.ReserveResponse:
        self.calls.append("Reserve")
        self.signal.fire()
        await self.may_answer.wait()
        await self.refuse_next(context)
        session = FakeSession(self, request)
        self.sessions.append(session)
        self.signal.fire()
        end = len(session.prompt_ids) - 1
        begin = self.num_cached
        if begin is None:
            begin = self.find_cached(request.prompt, request.cache_salt)
        ticket = kv_pb2.Ticket(
            incarnation=self.incarnation, session=len(self.sessions), attempt=request.attempt, begin=begin, end=end
        )
        is_here = end - begin <= request.local_prefill_max_tokens or (begin > 0 and end - begin < PAGE_TOKENS)
        session.needs_prefill = self.needs_prefill and not is_here
        if not self.is_manual:
            session.emit(request.max_tokens, "length")
        return decode_pb2.ReserveResponse(ticket=ticket, needs_prefill=session.needs_prefill)

    async def Steps(self, request: decode_pb2.StepsRequest, context: Context) -> AsyncIterator[decode_pb2.StepEvents]:
        stream = self.streams[request.gateway] = asyncio.Queue()
        try:
            yield decode_pb2.StepEvents(incarnation=self.peer.incarnation)
            while (events := await stream.get()) is not None:
                yield events
        finally:
            del self.streams[request.gateway]
            self.signal.fire()

    def break_streams(self) -> None:
        for stream in self.streams.values():
            stream.put_nowait(None)

    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:
        self.aborted.update(request.handles)
        self.calls.append("Abort")
        self.signal.fire()
        return decode_pb2.AbortResponse()


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """Reports prompts as prefilled, at once or when the test allows it."""

    def __init__(self, incarnation: str, signal: Signal, max_running: int = 4) -> None:
        super().__init__("prefill", incarnation, signal, max_running)
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.decodes: dict[str, FakeDecode] = {}  # incarnation |-> the worker that receives the pages; set by the test
        self.runs: list[prefill_pb2.RunRequest] = []
        self.response = prefill_pb2.RunResponse()  # to every run that succeeds
        self.num_cancelled = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)

    async def Run(self, request: prefill_pb2.RunRequest, context: Context) -> prefill_pb2.RunResponse:
        self.runs.append(request)
        self.signal.fire()
        await self.refuse_next(context)
        try:
            await self.may_finish.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.signal.fire()
            raise
        prompt = request.prompt[: request.ticket.end * TOKEN_BYTES]
        self.keep(prompt, request.cache_salt)
        if request.ticket.incarnation in self.decodes:
            self.decodes[request.ticket.incarnation].keep(prompt, request.cache_salt)
        self.signal.fire()
        return self.response


@asynccontextmanager
async def serving(worker: FakeWorker, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The worker's address while it listens; its connections are cut afterwards."""
    server = build_server()
    address = f"{host}:{bind(server, host, port)}"
    worker.add_to(server)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
