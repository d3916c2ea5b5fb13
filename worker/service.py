"""The rpcs that all workers answer: Status, Drain, Lend, and those of adapters and weights. On the asyncio thread."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import grpc

from engine.compose import FullEngine
from protos import kv_pb2, worker_pb2, worker_pb2_grpc
from runtime import rpc
from runtime.hardware import find_cores
from runtime.peer_input import find_foreign_token
from wire.messages import unpack_tokens
from wire.page_keys import PageKey
from worker.admission import OverGoalError
from worker.features import Features, LoanRefusedError, RefusedError
from worker.interfaces import NoSlotError, UnknownAdapterError
from worker.metrics import WorkerMetrics
from worker.params import SequenceParams
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.role import Worker
from worker.sequences import Sequence
from worker.thread import EngineThread

_REFUSED_FOR = {NoSlotError: rpc.NO_SLOT, OverGoalError: rpc.OVER_GOAL}
Context = grpc.aio.ServicerContext[Any, Any]


Call = Callable[[Any, Any, Context], Awaitable[Any]]


def admits(call: Call) -> Call:
    """An rpc that may admit a sequence: this worker's weights do not change while it runs. No room ends it."""

    @wraps(call)
    async def run(service: "WorkerService", request: Any, context: Context) -> Any:
        with service.weights.inside():
            try:
                return await call(service, request, context)
            except NoRoomError as error:
                lacking = _REFUSED_FOR.get(type(error), rpc.NO_ROOM)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), ((rpc.REFUSED_FOR, lacking),))

    return run


def find_token_bytes(engine: FullEngine) -> tuple[int, int]:
    """See `WorkerStatus.kv_token_bytes` and `head_token_bytes`."""
    pool = engine.pool
    heads = sum(shape.num_heads * sum(shape.expanded) for shape in engine.config.attention_shapes)
    kept_bytes = pool.num_stages * pool.shape.page_bytes // pool.shape.page_tokens
    return kept_bytes, heads * pool.num_ranks * pool.shape.dtype.itemsize


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The common part of the roles' services. Calls that change the scheduler hold the engine thread's lock."""

    def __init__(
        self, worker: Worker, thread: EngineThread, features: Features, transports: Callable[[], Mapping[str, str]],
        metrics: WorkerMetrics,
    ) -> None:  # fmt: skip
        """`transports`: every peer's address |-> transport."""
        self._me = worker.me
        self._scheduler = worker.scheduler
        self._shutdown = worker.shutdown
        self._context_tokens = worker.context_tokens
        self._threads = worker.threads
        self._cores = find_cores()
        self._vocab_size = worker.engine.config.vocab_size
        self._row_images = worker.engine.rows.images
        self._token_bytes = find_token_bytes(worker.engine)
        self._weaknesses = worker.engine.find_weaknesses()
        self._thread = thread
        self._adapters = features.adapters
        self._transports = transports
        self._speed = metrics.prompt_speed
        self.tiers = features.tiers
        self.images = features.images
        self.weights = features.weights

    async def close(self) -> None:
        """The server has stopped."""
        await self.tiers.close()
        self.images.close()

    async def check_draining(self, context: Context) -> None:
        """Abort the call if this worker accepts nothing new."""
        if self._shutdown.is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        if pause := self.weights.pause:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"this worker {pause}")

    async def admit(
        self, params: SequenceParams, keys: list[PageKey], context: Context, is_kept: bool = False
    ) -> Sequence:
        """Admit the params without yielding to other tasks. Aborts the call if there is no such adapter. NoRoomError.

        `keys`: `KVCacheManager.keys_of(params)`.
        """
        try:
            with self._thread.lock:
                sequence = self._scheduler.admit(params, time.monotonic(), is_kept, keys)
                sequence.read_tokens = self.tiers.count_read(sequence)
                self._thread.wake()
            return sequence
        except UnknownAdapterError as error:
            detail = f"worker {self._me.address}: {error}"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, detail, ((rpc.REFUSED_FOR, rpc.NO_ADAPTER),))
        except NeverFitsError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def encode_images(
        self, params: SequenceParams, images: Iterable[kv_pb2.Image], keys: list[PageKey], wait_s: float,
        context: Context,
    ) -> SequenceParams | None:  # fmt: skip
        """The params with encodings of the images that come as files and have no KV here. Aborts the call for bad ones.

        None: it takes longer than `wait_s`, and goes on; ask again. `keys`: as in `admit`.
        """
        kv = self._scheduler.kv
        with self._thread.lock:
            is_scored = params.num_prompt_logprobs is not None
            num_cached = 0 if is_scored else kv.find(keys).num_usable * kv.page_tokens
        files = {image.digest: image.data for image in images if image.data and image.end > num_cached}
        if not files:
            return params
        try:
            found = await self.images.encode(files, wait_s)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"an image {error}")
        return None if found is None else replace(params, encodings=found)

    def check_images(self, params: SequenceParams) -> None:
        """ValueError for images that the prompt's tokens, or the model, cannot have."""
        if params.images:
            images = [(image, None) for image in params.images]
            self._row_images.check(unpack_tokens(params.prompt), images)

    def find_bad_prompt(self, packed: bytes) -> str | None:
        """Why a prompt cannot be used; None if it can."""
        try:
            token_ids = unpack_tokens(packed)
        except ValueError:
            return f"prompt has {len(packed)} bytes, expected 4 for each token"
        return find_foreign_token(token_ids, self._vocab_size) if len(token_ids) else "prompt must not be empty"

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        self._shutdown.begin(f"Drain from {context.peer()}")
        return worker_pb2.DrainResponse(num_left=self._shutdown.num_left, drain_s=self._shutdown.drain_s)

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Context
    ) -> worker_pb2.LoadAdapterResponse:
        try:
            digest = await self._adapters.load(request.name, request.path, request.digest)
        except RefusedError as error:
            await context.abort(error.code, str(error))
        return worker_pb2.LoadAdapterResponse(digest=digest)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_pb2.UnloadAdapterResponse:
        self._adapters.unload(request.digest)
        return worker_pb2.UnloadAdapterResponse()

    async def Pause(self, request: worker_pb2.PauseRequest, context: Context) -> worker_pb2.PauseResponse:
        return worker_pb2.PauseResponse(num_left=self.weights.set_pause(request.for_s, request.ends))

    async def SetWeights(
        self, request: worker_pb2.SetWeightsRequest, context: Context
    ) -> worker_pb2.SetWeightsResponse:
        try:
            return await self.weights.set(request)
        except RefusedError as error:
            await context.abort(error.code, str(error))

    async def Lend(self, request: worker_pb2.LendRequest, context: Context) -> worker_pb2.LendResponse:
        try:
            return await self.tiers.lend(request)
        except LoanRefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def Status(self, request: worker_pb2.StatusRequest, context: Context) -> worker_pb2.WorkerStatus:
        progress = self._thread.progress()
        scheduler = self._scheduler
        status = worker_pb2.WorkerStatus(
            peer=self._me,
            context_tokens=self._context_tokens,
            free_pages=scheduler.kv.cache.num_spare,
            used_pages=scheduler.kv.cache.num_held,
            cached_pages=scheduler.kv.cache.num_cached,
            prefix_queries=scheduler.kv.num_queried,
            prefix_hits=scheduler.kv.num_hit,
            num_running=scheduler.num_running,
            max_running=scheduler.max_running,
            steps=progress.steps,
            step_age_s=progress.step_age_s,
            step_predicted_s=progress.step_predicted_s,
            draining=self._shutdown.is_draining,
            transports=self._transports(),
            threads=self._threads,
            cores=self._cores.num,
            cpus=self._cores.cpus,
            cpu_group=self._cores.group,
            prompt_tokens_waiting=scheduler.num_tokens_waiting,
            prompt_tokens_per_second=self._speed.tokens_per_s,
            weaknesses=self._weaknesses,
            adapters=scheduler.adapters.names,
            max_loras=scheduler.adapters.num_slots,
            takes_images=self.images.takes_images,
            kv_token_bytes=self._token_bytes[0],
            head_token_bytes=self._token_bytes[1],
            pause=self.weights.pause,
        )
        slots = scheduler.kv.states.cache
        status.free_slots, status.used_slots, status.cached_slots = slots.num_spare, slots.num_held, slots.num_cached
        self.tiers.add_to_status(status, request)
        self.add_to_status(status)
        return status

    def add_to_status(self, status: worker_pb2.WorkerStatus) -> None:
        """Set the fields that only this role has."""
