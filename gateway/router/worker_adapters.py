"""What one worker has of the adapters that the registry wants. Lives on the asyncio thread."""

import asyncio
import time
from collections.abc import Callable

import grpc
import structlog

from gateway.router.adapters import Adapter, AdapterRegistry
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from runtime.malformed import ask_twice

log = structlog.get_logger()

LOAD_S = 300.0  # a worker reads the folder from a disk that may be slow, one adapter after the other
UNLOAD_S = 10.0
RETRY_S = 10.0  # before a worker that could not load an adapter is asked again


class WorkerAdapters:
    """Asks the worker for what the registry wants, one call at a time, until `run` is cancelled."""

    def __init__(
        self,
        registry: AdapterRegistry,
        address: str,
        stub: prefill_pb2_grpc.PrefillStub | decode_pb2_grpc.DecodeStub,
        clock: Callable[[], float] = time.monotonic,
        mark: Callable[[], None] = lambda: None,
    ) -> None:
        """`mark`: called when the worker has loaded one."""
        self.loaded: frozenset[str] = frozenset()  # digests
        self.max_loras = 0  # 0: it takes none
        self.has_slots = True  # it has refused none for want of a slot since its last status
        self.address = address
        self._registry = registry
        self._stub = stub
        self._clock = clock
        self._mark = mark
        self._incarnation = ""
        self._dropped: set[str] = set()  # digests that this incarnation is to unload, once it has them
        self._failures: dict[str, tuple[str, float]] = {}  # digest |-> why it is not loaded, when it is tried again
        self._woken = asyncio.Event()

    def learn(self, status: decode_pb2.WorkerStatus) -> None:
        """The worker's latest status."""
        if status.peer.incarnation != self._incarnation:
            self._incarnation = status.peer.incarnation
            self._dropped.clear()
            self._failures.clear()
        self.loaded, self.max_loras = frozenset(status.adapters), status.max_loras
        self.has_slots = True
        self._woken.set()

    def follow(self, registry: AdapterRegistry) -> None:
        """It is to have the adapters of another model."""
        self._registry = registry
        self._woken.set()

    def wake(self) -> None:
        """What the registry wants has changed."""
        self._woken.set()

    def drop(self, digest: str) -> None:
        """It is to unload the adapter, unless the registry wants that again before."""
        self._dropped.add(digest)
        self._woken.set()

    def forget(self, digest: str) -> None:
        """It refused a request because it lacks the adapter."""
        self.loaded -= {digest}

    def describe(self) -> dict[str, str]:
        """Name |-> "loaded", or why it is not."""
        return {name: self._describe(adapter.digest) for name, adapter in self._registry.named.items()}

    def _describe(self, digest: str) -> str:
        if digest in self.loaded:
            return "loaded"
        if not self.max_loras:
            return "this worker takes no adapters: set --max-loras to 1 or more"
        return self._failures.get(digest, ("not loaded yet", 0.0))[0]

    async def run(self) -> None:
        """After each status, and each change of the registry."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            for adapter in self._registry.wanted() if self.max_loras else ():
                _reason, not_before = self._failures.get(adapter.digest, ("", 0.0))
                if adapter.digest not in self.loaded and self._clock() >= not_before:
                    await self._load_again(adapter)
            for digest in self._dropped & self.loaded:
                await self._unload(digest)

    async def _load_again(self, adapter: Adapter) -> None:
        try:
            await self.load(adapter.name, adapter.path, adapter.digest)
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
            if self._failures.get(adapter.digest, ("", 0.0))[0] != reason:
                log.error("adapter not loaded", adapter=adapter.name, address=self.address, reason=reason)
            self._failures[adapter.digest] = reason, self._clock() + RETRY_S

    async def load(self, name: str, path: str, digest: str = "") -> str:
        """Returns the digest of what the folder has; `digest`: what it must have. Raises grpc.aio.AioRpcError."""
        request = decode_pb2.LoadAdapterRequest(name=name, path=path, digest=digest)
        found = str((await ask_twice(lambda: self._stub.LoadAdapter(request, timeout=LOAD_S))).digest)
        self._failures.pop(found, None)
        self._dropped.discard(found)
        self.loaded |= {found}
        self._mark()
        return found

    async def _unload(self, digest: str) -> None:
        if self._registry.wants(digest):
            self._dropped.discard(digest)
            return
        try:
            await self._stub.UnloadAdapter(decode_pb2.UnloadAdapterRequest(digest=digest), timeout=UNLOAD_S)
        except grpc.aio.AioRpcError as error:  # again after the next status
            log.warning("adapter not unloaded", digest=digest, address=self.address, reason=error.details())
        else:
            self._dropped.discard(digest)
            self.loaded -= {digest}
