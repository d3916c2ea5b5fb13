"""Loads adapters into all workers, and unloads them: for the API's endpoints, and those of --lora at the start."""

import asyncio
from collections.abc import Mapping

import grpc
import structlog
from prometheus_client import CollectorRegistry, Gauge

from gateway.errors import ApiError, bad_request, not_ready
from gateway.router.adapters import Adapter
from gateway.router.fleet import Fleet
from gateway.router.worker_adapters import WorkerAdapters

log = structlog.get_logger()

AGAIN_S = 0.5  # before an adapter of --lora that could not be loaded is tried again
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


class AdapterLoader:
    """Loads and unloads one at a time."""

    def __init__(self, fleet: Fleet, registry: CollectorRegistry) -> None:
        self._fleet = fleet
        self._adapters = fleet.adapters
        self._lock = asyncio.Lock()
        loaded = Gauge("baton:adapters_loaded", "Adapters (LoRA) that requests may name", registry=registry)
        loaded.set_function(lambda: len(self._adapters.named) - len(self._adapters.pending))

    async def load_first(self, paths: Mapping[str, str]) -> None:
        """Until each name is loaded, or was unloaded; meanwhile requests for it wait."""
        pending = self._adapters.pending
        for name, path in paths.items():
            self._adapters.expect(name, path)
        while pending:
            for name in list(pending):
                try:
                    await self.load(name, paths[name])
                except ApiError as error:
                    if name in pending and pending[name] != error.message:
                        log.warning("adapter not loaded", adapter=name, path=paths[name], reason=error.message)
                        pending[name] = error.message
            if pending:
                await asyncio.sleep(AGAIN_S)

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Every worker that is alive loads the folder; then requests may name it. Raises ApiError.

        `in_place`: a name that is loaded gets what the folder has now.
        """
        async with self._lock:
            if name in self._adapters.named.keys() - self._adapters.pending.keys() and not in_place:
                raise bad_request(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    "lora_name",
                )
            digest = await self._load_all(name, path)
            self._adapters.add(Adapter(name, path, digest))
        log.info("adapter loaded", adapter=name, path=path, digest=digest)

    async def unload(self, name: str) -> None:
        """No new request gets it; its memory is freed after the last that runs. Raises ApiError."""
        async with self._lock:
            if not self._adapters.remove(name):
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name", "adapter_not_found")
        log.info("adapter unloaded", adapter=name)

    async def _load_all(self, name: str, path: str) -> str:
        """The digest, which all workers found. If one refuses, the others drop it again."""
        workers = self._find_workers()
        results = await asyncio.gather(*(one.load(name, path) for one in workers), return_exceptions=True)
        pairs = list(zip(workers, results, strict=True))
        loaded = {one.address: result for one, result in pairs if isinstance(result, str)}
        error = next((_describe(one, result) for one, result in pairs if isinstance(result, BaseException)), None)
        first, digest = next(iter(loaded.items()), ("", ""))
        if error is None and (other := next((one for one, found in loaded.items() if found != digest), None)):
            error = bad_request(
                f"{path} has other content for {other} (digest {loaded[other]}) than for {first} ({digest})",
                "lora_path",
            )
        if error is None:
            return digest
        for found in set(loaded.values()):
            if not self._adapters.wants(found):
                for one in workers:
                    one.drop(found)
        raise error

    def _find_workers(self) -> list[WorkerAdapters]:
        """Those alive that take adapters. Raises ApiError if there is no decode worker among them."""
        alive = [worker for worker in self._fleet.workers() if worker.find_trouble() is None]
        decodes = [worker for worker in alive if worker.role == "decode"]
        if not decodes:
            raise not_ready("no decode worker is alive to load the adapter")
        if not any(worker.adapters.max_loras for worker in decodes):
            raise bad_request("no decode worker takes adapters: start them with --max-loras of 1 or more", None)
        return [worker.adapters for worker in alive if worker.adapters.max_loras]


def _describe(worker: WorkerAdapters, error: BaseException) -> ApiError:
    if not isinstance(error, grpc.aio.AioRpcError):
        raise error
    detail = f"worker {worker.address}: {error.details() or error.code().name}"
    return bad_request(detail, "lora_path") if error.code() in REFUSED else not_ready(detail)
