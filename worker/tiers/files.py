"""Moves pages and slots between a worker's pools and their files, or other workers' pools. On the asyncio thread.

Written behind: a page is saved some time after it gets its key, and needs not be held for that. Read ahead: what a
prompt finds there comes into the pool before the prompt is admitted, which then finds it as if it had been cached.
"""

import asyncio
import os
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import get_args
from weakref import WeakValueDictionary

import structlog

from protos import kv_pb2, worker_pb2
from runtime.tasks import keep_running
from wire.page_keys import NamedPage, PageKey
from wire.timing import KVOrigin, ReadTokens
from worker.features import KVSource
from worker.kv_cache import Restore
from worker.metrics import WorkerMetrics
from worker.params import SequenceParams
from worker.peers.huge_pages import use_huge_pages
from worker.peers.kv_peers import KVPeers
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.role import Worker
from worker.sequences import Sequence
from worker.thread import EngineThread
from worker.tiers.events import KVEvents
from worker.tiers.key_log import KeyLog
from worker.tiers.loans import Borrower, Lender
from worker.tiers.named import NamedPages
from worker.tiers.plans import RestorePlan, plan_restore
from worker.tiers.reading import Fresh, Reading

SAVED_AT_ONCE = 256  # pages: more would only wait
NICE = 10  # of the thread that writes: steps go first
log = structlog.get_logger()


class KVTiers(KVSource):
    """Owns the tasks that save and read. A worker without files has no pools here."""

    def __init__(
        self, worker: Worker, peers: KVPeers, thread: EngineThread, metrics: WorkerMetrics,
        events: KVEvents | None = None,
    ) -> None:  # fmt: skip
        """`thread`: its lock guards the scheduler. `events`: closed here."""
        self._events = events
        self._scheduler = worker.scheduler
        self._thread = thread
        kv = worker.scheduler.kv
        self._fresh = Fresh(kv.cache.generations)
        parts = worker.scheduler, thread, metrics, self._fresh
        self._readings: dict[KVOrigin, Reading] = {origin: Reading(origin, *parts) for origin in get_args(KVOrigin)}
        self._lender = Lender(worker, thread)
        self.borrower = Borrower(worker, peers, thread, self._readings)
        self._pools = [pool for pool in worker.pools if pool.tiers.tiers]
        caches = [kv.cache, kv.states.cache][: len(self._pools)]
        self._keys, self._saved_keys = KeyLog(Lock()), KeyLog(Lock())
        kv.cache.watchers.append(self._keys)
        self._has_named = asyncio.Event()
        self._restoring: WeakValueDictionary[PageKey, asyncio.Task[None]] = WeakValueDictionary()  # last key |-> task
        self._reading_at: WeakValueDictionary[PageKey, asyncio.Task[None]] = WeakValueDictionary()
        # the first key that the pools lack |-> the task that reads from there on
        self._tasks: set[asyncio.Task[None]] = set()
        huge = partial(use_huge_pages, [pool.own for pool in worker.pools])
        self._keep(asyncio.create_task(keep_running(huge, "asking for huge pages")))
        if not self._pools:
            return
        loop = asyncio.get_running_loop()
        self._named = [NamedPages(cache, lambda: loop.call_soon_threadsafe(self._has_named.set)) for cache in caches]
        self._keep(asyncio.create_task(keep_running(self._save, "saving KV to files")))
        self._num_saved = metrics.counter("kv_pages_saved", "Pages and slots written to files")
        self._pools[0].tiers.report_to(self._saved_keys)
        files = [tier for pool in self._pools for tier in pool.tiers.tiers]
        metrics.gauge("kv_files", "Files of pages and slots", lambda: sum(tier.num_files for tier in files))
        metrics.gauge("kv_files_bytes", "Bytes in them", lambda: sum(tier.num_bytes for tier in files))
        metrics.gauge("kv_files_bad", "Files that could not be used", lambda: sum(tier.num_bad for tier in files))

    def add_to_status(self, status: worker_pb2.WorkerStatus, request: worker_pb2.StatusRequest) -> None:
        status.key_tokens_after = self._scheduler.kv.num_after
        if request.wants_keys:
            is_followed = request.incarnation == status.peer.incarnation
            status.keys.CopyFrom(self._keys.pack(request.keys_since if is_followed else 0))
            status.saved_keys.CopyFrom(self._saved_keys.pack(request.saved_keys_since if is_followed else 0))
        files = [tier for pool in self._pools for tier in pool.tiers.tiers]
        if files:
            status.kv_store = self._pools[0].tiers.tiers[-1].store
            status.saved_bytes = sum(tier.num_bytes for tier in files)
        for origin, reading in self._readings.items():
            setattr(status.read_tokens, origin, reading.num_tokens)
            status.restored_tokens += reading.num_tokens

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # NoRoomError, if whoever asked is gone

    # -- saving ------------------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        writer = ThreadPoolExecutor(1, "kv-writer", partial(os.setpriority, os.PRIO_PROCESS, 0, NICE))
        while True:
            await self._has_named.wait()
            self._has_named.clear()
            for pool, named in zip(self._pools, self._named, strict=True):
                while entries := self._take(named):
                    try:
                        self._num_saved.inc(await pool.save(entries, writer))
                    except Exception:
                        log.exception("KV was not saved")

    def _take(self, named: NamedPages) -> list[NamedPage]:
        with self._thread.lock:
            return named.take(SAVED_AT_ONCE)

    # -- reading -----------------------------------------------------------------------------------------------------

    async def restore(
        self, params: SequenceParams, keys: list[PageKey], wait_s: float, source: kv_pb2.PageSource | None = None
    ) -> bool:
        if not keys or not (self._pools or source):
            return True
        task = self._restoring.get(keys[-1])
        if task is None or task.done():
            with suppress(NeverFitsError), self._thread.lock:  # which its admission says
                self._scheduler.check_room(params, keys)  # else what is read would evict what others come back for
            task = self._restoring[keys[-1]] = asyncio.create_task(self._restore(keys, source))
            self._keep(task)
        done, _ = await asyncio.wait([task], timeout=wait_s)
        if done:
            task.result()
        return bool(done)

    async def _restore(self, keys: Seq[PageKey], source: kv_pb2.PageSource | None) -> None:
        """From files, then from the source what they did not have.

        NoRoomError: the prompt would have none either, and once it has some it could be computed without being read.
        """
        try:
            await self._wait_for_shared(keys)
            if self._pools:
                await self._restore_files(keys)
            if source is not None:
                await self.borrower.borrow(source, keys)
        except NoRoomError:
            if len(keys) <= self._scheduler.kv.cache.num_pages:  # else it never has
                raise
        except Exception:
            log.exception("KV cannot be read, and is computed")

    async def _wait_for_shared(self, keys: Seq[PageKey]) -> None:
        """Wait while the next page that this prompt lacks is read for another one, as long as such pages come."""
        before, lacked = b"", self._find_lacked(keys)
        while lacked != before and (other := self._reading_at.get(lacked)):
            await asyncio.wait([other])
            before, lacked = lacked, self._find_lacked(keys)
        if (task := asyncio.current_task()) is not None:
            self._reading_at.setdefault(lacked, task)

    def _find_lacked(self, keys: Seq[PageKey]) -> PageKey:
        with self._thread.lock:
            return keys[min(len(self._scheduler.kv.cache.find(keys)), len(keys) - 1)]

    async def _restore_files(self, keys: Seq[PageKey]) -> None:
        plan = await asyncio.to_thread(self._plan, keys)
        num_tokens = len(plan.keys) * self._scheduler.kv.page_tokens
        if (plan.keys or plan.slot_keys) and self._readings["files"].is_preferred(num_tokens):
            await self._readings["files"].fill(plan, self._load)

    def _plan(self, keys: Seq[PageKey]) -> RestorePlan:
        """Decides what to read. On a thread: it may ask the file system for each key."""
        tiers = [pool.tiers for pool in self._pools]
        for one in tiers:
            one.touch(keys)
        with self._thread.lock:
            num_there = len(self._scheduler.kv.cache.find(keys))
            num_usable = self._scheduler.kv.find(keys).num_usable
        num_found = num_there + tiers[0].find(keys[num_there:])
        has_slot = tiers[1].has if len(tiers) > 1 else None
        return plan_restore(keys, num_there, num_usable, num_found, has_slot)

    async def _load(self, restore: Restore) -> tuple[Seq[bool], int]:
        drafts = await self._pools[0].restore(restore.keys, restore.pages)
        if not restore.slots or len(drafts) < len(restore.pages):
            return drafts, 0
        return drafts, len(await self._pools[1].restore(restore.slot_keys, restore.slots))

    def count_read(self, sequence: Sequence) -> ReadTokens:
        if self._events is not None:
            self._events.seen.note(sequence)
        size = self._scheduler.kv.page_tokens
        return self._fresh.take(sequence.pages[: sequence.num_cached // size], size)

    async def lend(self, request: worker_pb2.LendRequest) -> worker_pb2.LendResponse:
        return await self._lender.lend(request)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.borrower.close()
        if self._events is not None:
            await self._events.close()
        for pool in self._pools:
            pool.tiers.close()
