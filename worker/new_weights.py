"""Other weights in the place of a worker's own, and its pauses. Runs on the asyncio thread, but for the change itself.

    serving ──Pause──► paused ──its time is over, or Pause for 0 s──► serving
       └── SetWeights ──► a second set is read, nothing new is taken ──nothing runs here──► serving, another incarnation
                               └── it cannot be read, or something still runs ──► serving, as before

No call that may admit a sequence runs during a change, so none has keys of the old weights and KV of the new. Peers and
gateways hold a worker to its incarnation: what they know of the old one is refused by name.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import structlog

from engine.compose import FullEngine, check_new_weights, read_new_weights
from engine.weights.files import list_shards
from protos import worker_pb2
from runtime.hardware import available_memory_bytes
from runtime.rpc import MAX_PAUSE_S, REVISION_CHARS
from runtime.tasks import run_to_end
from worker.features import RefusedError, Weights
from worker.peers.other_ranks import Verb, run_all
from worker.role import Worker
from worker.thread import EngineThread, call_in_thread

log = structlog.get_logger()


class ReadWeights:
    """The set that one rank has read and not taken yet."""

    def __init__(self, engine: FullEngine) -> None:
        self._engine = engine
        self._take: Callable[[], None] | None = None

    def do(self, verb: Verb, folder: str = "", weights: str = "") -> None:
        """See `OtherRanks.set_weights`; takes while no step runs. Raises ValueError, OSError."""
        take, self._take = self._take, None
        if verb == "read":
            self._take = call_in_thread(partial(read_new_weights, self._engine, Path(folder), weights))
        elif verb == "take" and take is not None:
            take()


class NewWeights(Weights):
    """Owns the pause, and the change."""

    def __init__(self, worker: Worker, thread: EngineThread, root: str) -> None:
        """`root`: the folder below which new weights may lie; empty: none may be given."""
        self._worker = worker
        self._me = worker.me
        self._scheduler = worker.scheduler
        self._thread = thread
        self._root = root
        self._read = ReadWeights(worker.engine)
        self._process = worker.me.incarnation
        self._num_changes = 0
        self._paused_until = 0.0  # time.monotonic()
        self._is_changing = False
        self._num_calls = 0
        self._freed = asyncio.Event()
        loop, before = asyncio.get_running_loop(), worker.scheduler.on_empty

        def on_empty() -> None:
            before()
            loop.call_soon_threadsafe(self._freed.set)

        worker.scheduler.on_empty = on_empty

    @property
    def pause(self) -> str:
        if self._is_changing:
            return "gets new weights"
        return "is paused" if time.monotonic() < self._paused_until else ""

    @contextmanager
    def inside(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._freed.set()

    def set_pause(self, for_s: float, ends: bool) -> int:
        self._paused_until = time.monotonic() + min(for_s, MAX_PAUSE_S)
        log.info("paused" if for_s else "goes on", for_s=for_s, ends=ends, left=len(self._scheduler))
        if ends:
            self.leave(self._me.incarnation)
        return len(self._scheduler)

    async def set(self, request: worker_pb2.SetWeightsRequest) -> worker_pb2.SetWeightsResponse:
        return await asyncio.shield(run_to_end(self._set(request)))

    async def _set(self, request: worker_pb2.SetWeightsRequest) -> worker_pb2.SetWeightsResponse:
        try:
            folder = await asyncio.to_thread(self._find_folder, request.path)
            if not request.weights:
                weights = await asyncio.to_thread(check_new_weights, self._worker.engine, folder)
                return worker_pb2.SetWeightsResponse(weights=weights)
            still_s = 0.0
            if request.weights != self._me.layout.weights:
                still_s = await self._change(request, folder)
        except (ValueError, OSError) as error:
            log.warning("weights refused", path=request.path, reason=str(error))
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        return worker_pb2.SetWeightsResponse(weights=request.weights, still_s=still_s)

    def _find_folder(self, path: str) -> Path:
        """Raises RefusedError where nothing there may be read."""
        if not self._root:
            why = "this worker takes no new weights: set --weights-dir to the folder that they come to"
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, why)
        root, folder = Path(self._root).resolve(), Path(path)
        if not folder.is_absolute() or not folder.resolve().is_relative_to(root):
            raise ValueError(f"path {path} is not below --weights-dir, which is {root}")
        if not folder.is_dir():
            raise ValueError(f"path {path} is no folder on this worker's host")
        return folder.resolve()

    async def _change(self, request: worker_pb2.SetWeightsRequest, folder: Path) -> float:
        """Returns the seconds in which nothing was computed. Raises RefusedError, ValueError, OSError."""
        if self._is_changing:
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "this worker is taking other weights now")
        self._is_changing = True
        ends_at = time.monotonic() + request.wait_s
        try:
            needed, free = sum(path.stat().st_size for path in list_shards(folder)), available_memory_bytes()
            if needed > free:
                why = f"a second set of weights takes {needed >> 20} MiB of main memory, and {free >> 20} MiB are free"
                raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            try:
                reading = asyncio.to_thread(self._read.do, "read", str(folder), request.weights)
                await run_all([reading, *self._worker.others.set_weights("read", str(folder), request.weights)])
                await self._wait_until_quiet(ends_at)
            except BaseException:
                self._read.do("drop")
                await run_all(self._worker.others.set_weights("drop"))
                raise
            return await self._take(request)
        finally:
            self._is_changing = False

    async def _wait_until_quiet(self, ends_at: float) -> None:
        """Until no sequence is here, and no call that may admit one. Raises RefusedError."""
        while self._num_calls or len(self._scheduler):
            self._freed.clear()
            try:
                async with asyncio.timeout(ends_at - time.monotonic()):
                    await self._freed.wait()
            except TimeoutError:
                why = f"{len(self._scheduler)} sequences were still running: allow more time, or have them end"
                raise RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, why) from None

    async def _take(self, request: worker_pb2.SetWeightsRequest) -> float:
        """From here on a failure ends this process: its ranks, or tensors, would be of two sets."""
        began = time.perf_counter()
        try:
            await run_all(self._worker.others.set_weights("take"))
            await asyncio.wrap_future(self._thread.call(partial(self._take_here, request.weights)))
        except BaseException:
            log.exception("new weights could not be put in place; this process ends")
            self._worker.others.end_process()
            raise
        self._num_changes += 1
        me, before = self._me, self._me.layout.weights
        me.incarnation = f"{self._process}+{self._num_changes}"
        me.layout.weights, me.revision = request.weights, request.revision or request.weights[-REVISION_CHARS:]
        if me.HasField("states"):
            me.states.layout.weights = request.weights
        self.leave(me.incarnation)
        still_s = time.perf_counter() - began
        log.info("weights changed", before=before, now=me.layout.weights, incarnation=me.incarnation, still_s=still_s)
        return still_s

    def _take_here(self, weights: str) -> None:
        """On the engine's thread, between two steps."""
        kv = self._scheduler.kv
        with self._thread.lock:
            assert not len(self._scheduler), "a sequence began with the old weights"
            self._read.do("take")
            kv.model = weights
            for cache in (kv.cache, kv.states.cache):
                cache.release(cache.allocate(cache.num_spare))  # all that was cached loses its key
