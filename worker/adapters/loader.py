"""Loads adapters (LoRA) into the memory of all ranks of a worker, one at a time. Runs on the asyncio thread."""

import asyncio
from pathlib import Path

import grpc
import structlog

from engine.adapters.peft import WEIGHTS, find_digest
from engine.adapters.slots import HostAdapter
from engine.compose import FullEngine
from runtime.hardware import available_memory_bytes
from runtime.tasks import run_to_end
from worker.adapters.slots import AdapterSlots
from worker.features import AdapterSource, RefusedError
from worker.metrics import WorkerMetrics
from worker.peers.other_ranks import OtherRanks, run_all
from worker.thread import EngineThread

log = structlog.get_logger()

MOST_LOADED = 1024  # Status has the name of each
MOST_BYTES = 16 << 30  # of all together; a rank of 16 on all products of a model of 8 G parameters takes 84 MB
MOST_NAME_CHARS = 256


def read_adapter(engine: FullEngine, folder: Path, digest: str) -> HostAdapter:
    """This rank's part. ValueError or OSError says why the folder cannot be used, or that it changed meanwhile."""
    assert engine.read_adapter is not None
    adapter = engine.read_adapter(folder)
    if (found := find_digest(folder)) != digest:
        raise ValueError(f"{folder} changed while it was loaded: its digest was {digest}, and is {found}")
    return adapter


class AdapterLoader(AdapterSource):
    """Hosts what it reads under keys of `slots`; the engine thread frees it (WorkerLoop.step)."""

    def __init__(
        self, engine: FullEngine, slots: AdapterSlots, others: OtherRanks, thread: EngineThread, metrics: WorkerMetrics
    ) -> None:
        """`thread`: its lock guards `slots`."""
        self._engine = engine
        self._slots = slots
        self._others = others
        self._thread = thread
        self._is_loading = asyncio.Lock()
        metrics.gauge("adapters_loaded", "Adapters that requests may name", lambda: len(slots.names))
        metrics.gauge("adapter_slots_used", "Slots whose adapter a sequence has", lambda: slots.num_held)

    async def load(self, name: str, path: str, digest: str) -> str:
        return await asyncio.shield(run_to_end(self._load(name, Path(path), digest)))

    async def _load(self, name: str, folder: Path, expected: str) -> str:
        if not 0 < len(name) <= MOST_NAME_CHARS:
            raise RefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, f"name has {len(name)} characters, expected 1 to {MOST_NAME_CHARS}"
            )
        async with self._is_loading:
            if self._rename(expected, name):
                return expected
            try:
                digest = await asyncio.to_thread(find_digest, folder)
                if expected not in ("", digest):
                    raise RefusedError(
                        grpc.StatusCode.FAILED_PRECONDITION, f"{folder} has the digest {digest}, expected {expected}"
                    )
                if not self._rename(digest, name):
                    self._check_room((folder / WEIGHTS).stat().st_size)
                    await self._host(name, folder, digest)
            except (ValueError, OSError) as error:
                log.warning("adapter refused", adapter=name, path=str(folder), reason=str(error))
                raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        return digest

    def _rename(self, digest: str, name: str) -> bool:
        with self._thread.lock:
            return self._slots.rename(digest, name)

    def _check_room(self, num_bytes: int) -> None:
        taken, free = self._slots.num_bytes, available_memory_bytes()
        if taken + num_bytes > MOST_BYTES or num_bytes > free // 2 or self._slots.num_loaded >= MOST_LOADED:
            raise RefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no memory for an adapter of {num_bytes >> 20} MiB: {self._slots.num_loaded} adapters take "
                f"{taken >> 20} MiB, of at most {MOST_LOADED} and {MOST_BYTES >> 20} MiB, and half of {free >> 20} MiB "
                "of free memory may be taken; unload others",
            )

    async def _host(self, name: str, folder: Path, digest: str) -> None:
        """All ranks read their parts; if one cannot, none keeps its own."""
        with self._thread.lock:
            key = self._slots.new_key(digest)
        try:
            others = self._others.load_adapter(key, str(folder), digest)
            await run_all([self._host_here(key, folder, digest), *others])
        except BaseException:
            with self._thread.lock:
                self._slots.drop(key)
                self._thread.wake()
            raise
        num_bytes = self._count_bytes(key)
        with self._thread.lock:
            self._slots.add(digest, key, name, num_bytes)
        log.info("adapter loaded", adapter=name, digest=digest, path=str(folder), bytes=num_bytes)

    async def _host_here(self, key: str, folder: Path, digest: str) -> None:
        adapter = await asyncio.to_thread(read_adapter, self._engine, folder, digest)
        assert self._engine.adapters is not None
        with self._thread.lock:
            self._engine.adapters.hosted[key] = adapter

    def _count_bytes(self, key: str) -> int:
        """Over all ranks."""
        assert self._engine.adapters is not None
        sites = self._engine.adapters.hosted[key].values()
        return self._engine.pool.num_ranks * sum(part.nbytes for site in sites for part in (site.a, *site.b))

    def unload(self, digest: str) -> None:
        with self._thread.lock:
            self._slots.unload(digest)
            self._thread.wake()
        log.info("adapter unloaded", digest=digest)
