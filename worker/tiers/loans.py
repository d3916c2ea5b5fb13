"""Cached pages that prefill workers read from one another: named by the one, read by the other.

The lender holds nothing while it is read: generations show what changed. So a loan ends by itself, whoever dies.
Runs on the asyncio thread.
"""

import asyncio
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial

import grpc
import structlog

from kvtransfer.checksums import parts_of
from kvtransfer.layout import find_bad_ranks
from kvtransfer.reader import ReadError
from protos import kv_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2
from runtime.config import PrefillConfig
from wire.page_keys import PageKey
from worker.features import LoanRefusedError
from worker.kv_cache import Restore
from worker.metrics import WorkerMetrics
from worker.peers.kv_peers import HandshakeRefusedError, KnownPeer, KVPeers
from worker.peers.links import PeerLinks
from worker.role import Worker
from worker.thread import EngineThread
from worker.tiers.files import KVTiers
from worker.tiers.plans import begin_loan, end_loan, plan_loan
from worker.tiers.reading import RECHECK_S, Reading

LEND_S = 2.0  # until a lender answers
BORROW_S = 10.0  # until all is read: more is rarely worth it, and a lender may hang
log = structlog.get_logger()


class Lender:
    """Names pages that are cached here."""

    def __init__(self, worker: Worker, thread: EngineThread) -> None:
        self._me = worker.me
        self._pools = worker.pools
        self._kv = worker.scheduler.kv
        self._thread = thread

    async def lend(self, request: prefill_pb2.LendRequest) -> prefill_pb2.LendResponse:
        """Raises LoanRefusedError."""
        self._check(request)
        begin, kv = request.begin, self._kv
        with self._thread.lock:
            loan = begin_loan(kv, request.keys, begin, kv.max_offer_pages)
        try:
            offer = kv_pb2.OfferRequest(
                incarnation=self._me.incarnation, begin=begin * kv.page_tokens,
                end=(begin + len(loan.pages)) * kv.page_tokens,
            )  # fmt: skip
            for pool, part, held in zip(self._pools, parts_of(offer), (loan.pages, loan.slots), strict=False):
                await pool.offer(part, held, len(request.reader.ranks))
            has_draft = map(kv.cache.has_draft, loan.pages)
            return prefill_pb2.LendResponse(peer=self._me, offer=offer, has_draft=has_draft)
        finally:
            with self._thread.lock:
                end_loan(kv, loan)

    def _check(self, request: prefill_pb2.LendRequest) -> None:
        if request.incarnation != self._me.incarnation:
            detail = f"incarnation {request.incarnation} was asked; this worker is {self._me.incarnation}"
            raise LoanRefusedError(detail)
        if request.begin > len(request.keys):
            raise LoanRefusedError(f"page {request.begin} is wanted, and {len(request.keys)} have keys")
        for pool in self._pools if request.HasField("reader") else []:
            if (problem := find_bad_ranks(pool.own.parts, request.reader)) is not None:
                raise LoanRefusedError(problem)


class Borrower:
    """Reads pages of other prefill workers into the pool, where that is faster than to compute them."""

    def __init__(self, worker: Worker, config: PrefillConfig, thread: EngineThread, metrics: WorkerMetrics) -> None:
        self.peers = KVPeers(worker.me, worker.pools, config, metrics)
        self.reading = Reading("peer", worker.scheduler, thread, metrics.prompt_speed)
        self._me = worker.me
        self._kv = worker.scheduler.kv
        self._thread = thread
        self._lenders = PeerLinks(worker.trust.open_channel, prefill_pb2_grpc.PrefillStub)
        self._failed: dict[str, float] = {}  # incarnation |-> time.monotonic() of its last failure
        reading = self.reading
        metrics.gauge("kv_tokens_borrowed", "Prompt tokens whose KV was read from peers", lambda: reading.num_tokens)

    async def borrow(self, source: prefill_pb2.PageSource, keys: Seq[PageKey]) -> None:
        """Read what the pool lacks of these pages and the source has. What cannot be read is not there; NoRoomError."""
        if time.monotonic() < self._failed.get(source.incarnation, -RECHECK_S) + RECHECK_S:
            return
        try:
            async with asyncio.timeout(BORROW_S):
                begin, end = -1, self._count_cached(keys)
                while begin < end and await self._borrow_part(source, keys, end):
                    begin, end = end, self._count_cached(keys)
        except (ReadError, HandshakeRefusedError, grpc.aio.AioRpcError, TimeoutError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error) or "it takes too long"
            log.warning("KV of a peer is not read", peer=source.address, reason=reason)
            if not isinstance(error, ReadError) or error.reason != "generation":  # else it was only evicted
                self._failed = {one: at for one, at in self._failed.items() if at > time.monotonic() - RECHECK_S}
                self._failed[source.incarnation] = time.monotonic()

    def _count_cached(self, keys: Seq[PageKey]) -> int:
        with self._thread.lock:
            return len(self._kv.cache.find(keys))

    async def _borrow_part(self, source: prefill_pb2.PageSource, keys: Seq[PageKey], begin: int) -> bool:
        """Read what one answer names. False: there is nothing more, or to compute it is faster."""
        num_tokens = min(source.tokens, len(keys) * self._kv.page_tokens) - begin * self._kv.page_tokens
        if num_tokens <= 0 or not self.reading.is_preferred(num_tokens):
            return False
        reader = self._me if self.peers.wants_checksums else None
        request = prefill_pb2.LendRequest(incarnation=source.incarnation, keys=keys, begin=begin, reader=reader)
        async with self._lenders.use(source.address) as lender:
            response: prefill_pb2.LendResponse = await lender.Lend(request, timeout=LEND_S)
        num_pages, num_slots = len(response.offer.pages), len(response.offer.slots)
        if not num_pages:
            return False
        most_slots = min(self._kv.states.cache.num_pages, 1)
        if num_pages != len(response.has_draft) or num_pages > len(keys) - begin or num_slots > most_slots:
            raise ReadError("bounds", f"{num_pages} pages and {num_slots} slots of {source.address} do not fit")
        known = await self.peers.shake_hands(response.peer)
        await self.reading.fill(plan_loan(keys, begin, num_pages, num_slots), partial(self._read, response, known))
        return True

    async def _read(
        self, response: prefill_pb2.LendResponse, known: KnownPeer, restore: Restore
    ) -> tuple[Seq[bool], int]:
        await self.peers.read(response.offer, known, (restore.pages, restore.slots))
        return response.has_draft, len(restore.slots)

    async def close(self) -> None:
        await self.peers.close()
        await self._lenders.close()


class SharedTiers(KVTiers):
    """The tiers of a prefill worker: its files, and the pages of the others."""

    def __init__(self, worker: Worker, config: PrefillConfig, thread: EngineThread, metrics: WorkerMetrics) -> None:
        super().__init__(worker, thread, metrics)
        self._lender = Lender(worker, thread)
        self._borrower = Borrower(worker, config, thread, metrics)

    async def restore(self, keys: Seq[PageKey], wait_s: float, lender: prefill_pb2.PageSource | None = None) -> bool:
        borrow = None if lender is None else partial(self._borrower.borrow, lender, keys)
        return await self.read(keys, wait_s, borrow)

    async def lend(self, request: prefill_pb2.LendRequest) -> prefill_pb2.LendResponse:
        return await self._lender.lend(request)

    def transports(self) -> Mapping[str, str]:
        return self._borrower.peers.transports()

    def add_to_status(self, status: worker_pb2.WorkerStatus) -> None:
        super().add_to_status(status)
        status.restored_tokens += self._borrower.reading.num_tokens

    async def close(self) -> None:
        await super().close()
        await self._borrower.close()
