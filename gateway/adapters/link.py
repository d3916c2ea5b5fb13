"""Keeps the adapters of one worker as the registry wants them. Lives on the asyncio thread."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import grpc
import structlog

from gateway.adapters.registry import Adapter, AdapterRegistry
from gateway.router.interfaces import Adapters, WorkerAdapters
from protos import worker_pb2, worker_pb2_grpc
from runtime.malformed import ask_twice

log = structlog.get_logger()

LOAD_S = 300.0  # a worker reads the folder from a disk that may be slow, one adapter after the other
UNLOAD_S = 10.0
RETRY_S = 10.0  # before a worker that could not load an adapter is asked again


class LoadFailure(NamedTuple):
    """Why a worker could not load an adapter."""

    code: grpc.StatusCode
    reason: str
    retry_at: float


class AdapterLink(WorkerAdapters):
    """Loads what the registry wants into the worker and unloads the rest, one call at a time, until `run` is cancelled.

    It unloads only what the registry has wanted of this incarnation: another gateway may have had others loaded.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        address: str,
        stub: worker_pb2_grpc.WorkerStub,
        clock: Callable[[], float],
        mark: Callable[[], None],
    ) -> None:
        """As `Adapters.link`."""
        self.max_loras = 0  # 0: it takes none
        self._address = address
        self._registry = registry
        self._stub = stub
        self._clock = clock
        self._mark = mark
        self._incarnation = ""
        self._ours: set[str] = set()  # digests that the registry has wanted of this incarnation
        self._reports: dict[Adapter, str | LoadFailure] = {}  # |-> its digest here, or why it is not loaded
        self._woken = asyncio.Event()

    def learn(self, status: worker_pb2.WorkerStatus, version: int) -> None:
        """Takes a worker's status, but not its adapters where `loaded` has changed here since `version`."""
        is_new = status.peer.incarnation != self._incarnation
        if is_new:
            self._incarnation = status.peer.incarnation
            self._ours.clear()
            self._reports.clear()
        if is_new or version == self.version:
            self.loaded = frozenset(status.adapters)
        self.max_loras = status.max_loras
        self.has_slots = True
        self._woken.set()

    def follow(self, adapters: Adapters) -> None:
        assert isinstance(adapters, AdapterRegistry)
        self._registry = adapters
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    def forget(self, digest: str) -> None:
        self._change(self.loaded - {digest})

    def _change(self, loaded: frozenset[str]) -> None:
        self.loaded = loaded
        self.version += 1

    def find(self, adapter: Adapter) -> str | LoadFailure | None:
        """The adapter's digest once it is loaded here, or why it is not; None: it has not been tried."""
        report = self._reports.get(adapter)
        digest = adapter.digest or report
        return digest if digest in self.loaded else report if isinstance(report, LoadFailure) else None

    def describe(self) -> dict[str, str]:
        return {name: self._describe(self.find(adapter)) for name, adapter in self._registry.named.items()}

    def _describe(self, found: str | LoadFailure | None) -> str:
        if isinstance(found, str):
            return "loaded"
        if not self.max_loras:
            return "this worker takes no adapters: set --max-loras to 1 or more"
        return found.reason if found else "not loaded yet"

    async def run(self) -> None:
        """Loads and unloads after each status, and each change of the registry."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            wanted = self._registry.wanted() if self.max_loras else []
            self._reports = {adapter: self._reports[adapter] for adapter in wanted if adapter in self._reports}
            for adapter in wanted:
                found = self.find(adapter)
                if found is None or (isinstance(found, LoadFailure) and self._clock() >= found.retry_at):
                    await self._load(adapter)
            self._ours |= self._find_digests()
            for digest in self._ours & self.loaded:
                if digest not in self._find_digests():
                    await self._unload(digest)

    def _find_digests(self) -> set[str]:
        """The digests of the adapters that the registry wants, as far as they are known here."""
        found = {adapter.digest or self._reports.get(adapter) for adapter in self._registry.wanted()}
        return {digest for digest in found if isinstance(digest, str)}

    async def _load(self, adapter: Adapter) -> None:
        request = worker_pb2.LoadAdapterRequest(name=adapter.name, path=adapter.path, digest=adapter.digest)
        incarnation = self._incarnation
        found: LoadFailure | None = None
        try:
            digest = str((await ask_twice(lambda: self._stub.LoadAdapter(request, timeout=LOAD_S))).digest)
        except grpc.aio.AioRpcError as error:
            found = LoadFailure(error.code(), error.details() or error.code().name, self._clock() + RETRY_S)
        if incarnation != self._incarnation:  # its successor is asked next
            return
        if found is None:
            self._reports[adapter] = digest
            self._ours.add(digest)
            self._change(self.loaded | {digest})
        else:
            before, self._reports[adapter] = self._reports.get(adapter), found
            if not (isinstance(before, LoadFailure) and before.reason == found.reason):
                log.error("adapter not loaded", adapter=adapter.name, address=self._address, reason=found.reason)
        self._mark()

    async def _unload(self, digest: str) -> None:
        incarnation = self._incarnation
        try:
            await self._stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(digest=digest), timeout=UNLOAD_S)
        except grpc.aio.AioRpcError as error:  # again after the next status
            log.warning("adapter not unloaded", digest=digest, address=self._address, reason=error.details())
        else:
            if incarnation == self._incarnation:
                self._ours.discard(digest)
                self._change(self.loaded - {digest})
                self._mark()


class LinkedAdapters(AdapterRegistry, Adapters):
    """The registry of one model, whose workers follow it."""

    def link(
        self, address: str, stub: worker_pb2_grpc.WorkerStub, clock: Callable[[], float], mark: Callable[[], None]
    ) -> AdapterLink:
        return AdapterLink(self, address, stub, clock, mark)
