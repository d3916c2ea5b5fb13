"""Loads adapters, and unloads them: for the API's endpoints, and those of --lora. Lives on the asyncio thread.

The registry says what is wanted, each worker follows it by itself; here it is seen when all have it, or one has not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import grpc
import structlog
from prometheus_client import CollectorRegistry, Gauge

from gateway.adapters.link import AdapterLink, LoadFailure
from gateway.adapters.registry import Adapter, AdapterRegistry
from gateway.errors import ApiError, bad_request, not_ready
from gateway.router.fleet import Fleet
from gateway.router.worker_client import WorkerClient

log = structlog.get_logger()

REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


Share = Callable[[str, Adapter | None], Awaitable[None]]


async def _keep_to_itself(name: str, adapter: Adapter | None) -> None:
    pass


class AdapterLoader:
    """Loads and unloads one at a time for the API, and those of --lora beside."""

    def __init__(self, fleet: Fleet, registry: CollectorRegistry) -> None:
        """`fleet`: whose adapters an AdapterRegistry has."""
        assert isinstance(fleet.adapters, AdapterRegistry)
        self._fleet = fleet
        self.adapters = fleet.adapters
        self._lock = asyncio.Lock()
        self.share: Share = _keep_to_itself  # called when the API has loaded an adapter, or unloaded the name (None)
        fleet.changes.follow(self._settle)
        loaded = Gauge("baton:adapters_loaded", "Adapters (LoRA) that requests may name", registry=registry)
        loaded.set_function(lambda: len(self.adapters.named) - len(self.adapters.pending))

    def expect(self, paths: Mapping[str, str]) -> None:
        """Takes the adapters of --lora: each is tried until loaded, or unloaded; meanwhile requests for it wait."""
        for name, path in paths.items():
            self.adapters.expect(name, path)

    def _settle(self) -> None:
        for adapter in [self.adapters.named[name] for name in self.adapters.pending]:
            found = self._find(adapter)
            if isinstance(found, str):
                self._add(adapter, found)
            elif found is not None and found.message != adapter.reason:
                log.warning("adapter not loaded", adapter=adapter.name, path=adapter.path, reason=found.message)
                adapter.reason = found.message

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Every worker that is alive loads the folder; then requests may name it. If one refuses, all drop it again.

        `in_place`: a name that is loaded gets what the folder has now. Raises ApiError.
        """
        async with self._lock:
            if name in self.adapters.named.keys() - self.adapters.pending.keys() and not in_place:
                raise bad_request(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    "lora_name",
                )
            with self.adapters.trying(name, path) as adapter:
                while (found := self._find(adapter)) is None:  # again: a worker may have come since the change
                    await self._fleet.changes.until(lambda: self._find(adapter) is not None)
                if isinstance(found, ApiError):
                    raise found
                self._add(adapter, found)
            await self.share(name, adapter)

    def follow(self, name: str, path: str, digest: str) -> None:
        """Another gateway has loaded the adapter, or unloaded the name if `path` is empty."""
        known = self.adapters.named.get(name)
        if not path:
            if self.adapters.remove(name):
                log.info("adapter unloaded at another gateway", adapter=name)
        elif known is None or (known.path, known.digest) != (path, digest):
            self._add(Adapter(name, path), digest)

    def _add(self, adapter: Adapter, digest: str) -> None:
        self.adapters.add(adapter, digest)
        log.info("adapter loaded", adapter=adapter.name, path=adapter.path, digest=digest)

    async def unload(self, name: str) -> None:
        """Gives no new request the adapter; its memory is freed after the last that runs. Raises ApiError."""
        async with self._lock:
            if not self.adapters.remove(name):
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name", "adapter_not_found")
            log.info("adapter unloaded", adapter=name)
            await self.share(name, None)

    def _find(self, adapter: Adapter) -> str | ApiError | None:
        """The digest, which all workers found; or why one has not; None: some have not answered yet."""
        alive = [worker for worker in self._fleet.workers() if worker.find_trouble() is None]
        decodes = [worker for worker in alive if worker.view().answers]
        if not decodes:
            return not_ready("no decode worker is alive to load the adapter")
        if not any(_link(worker).max_loras for worker in decodes):
            return bad_request("no decode worker takes adapters: start them with --max-loras of 1 or more", None)
        reports = [(worker, _link(worker).find(adapter)) for worker in alive if _link(worker).max_loras]
        for worker, found in reports:
            if isinstance(found, LoadFailure):
                return _describe(worker, found)
        first, digest = reports[0]
        for worker, found in reports:
            if found is None:
                return None
            if found != digest:
                here, there = f"{worker.address} (digest {found})", f"{first.address} ({digest})"
                return bad_request(f"{adapter.path} has other content for {here} than for {there}", "lora_path")
        return digest if isinstance(digest, str) else None


def _link(worker: WorkerClient) -> AdapterLink:
    assert isinstance(worker.adapters, AdapterLink)
    return worker.adapters


def _describe(worker: WorkerClient, failure: LoadFailure) -> ApiError:
    detail = f"worker {worker.address}: {failure.reason}"
    return bad_request(detail, "lora_path") if failure.code in REFUSED else not_ready(detail)
