"""Pages that workers of any role read from one another's pools: named by the one, read by the other.

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
from protos import kv_pb2, worker_pb2, worker_pb2_grpc
from wire.page_keys import PageKey
from wire.timing import KVOrigin
from worker.features import LoanRefusedError
from worker.kv_cache import Restore
from worker.peers.kv_peers import HandshakeRefusedError, KnownPeer, KVPeers
from worker.peers.links import PeerLinks
from worker.role import Worker
from worker.thread import EngineThread
from worker.tiers.plans import find_loan, plan_loan
from worker.tiers.reading import RECHECK_S, Reading

LEND_S = 2.0  # until a lender answers
BORROW_S = 10.0  # until all is read: more is rarely worth it, and a lender may hang
log = structlog.get_logger()


class Lender:
    """Names pages that are cached here, or in use."""

    def __init__(self, worker: Worker, thread: EngineThread) -> None:
        self._me = worker.me
        self._pools = worker.pools
        self._kv = worker.scheduler.kv
        self._thread = thread

    async def lend(self, request: worker_pb2.LendRequest) -> worker_pb2.LendResponse:
        """Raises LoanRefusedError."""
        self._check(request)
        begin, kv = request.begin, self._kv
        offer = kv_pb2.OfferRequest(incarnation=self._me.incarnation, begin=begin * kv.page_tokens)
        parts = list(zip(self._pools, parts_of(offer), strict=False))
        with self._thread.lock:
            loan = find_loan(kv, request.keys, begin, kv.max_offer_pages)
            for (pool, part), pages in zip(parts, loan, strict=False):
                pool.name(part, pages)
            has_draft = list(map(kv.cache.has_draft, loan.pages))
        offer.end = (begin + len(loan.pages)) * kv.page_tokens
        for pool, part in parts:
            await pool.add_checksums(part, request.reader)
        return worker_pb2.LendResponse(peer=self._me, offer=offer, has_draft=has_draft)

    def _check(self, request: worker_pb2.LendRequest) -> None:
        if request.incarnation != self._me.incarnation:
            detail = f"incarnation {request.incarnation} was asked; this worker is {self._me.incarnation}"
            raise LoanRefusedError(detail)
        if request.begin > len(request.keys):
            raise LoanRefusedError(f"page {request.begin} is wanted, and {len(request.keys)} have keys")
        for pool in self._pools if request.HasField("reader") else []:
            if (problem := find_bad_ranks(pool.own.parts, request.reader)) is not None:
                raise LoanRefusedError(problem)


class Borrower:
    """Reads pages of other workers into the pool, where that is faster than to compute them."""

    def __init__(
        self, worker: Worker, peers: KVPeers, thread: EngineThread, readings: Mapping[KVOrigin, Reading]
    ) -> None:
        """`readings`: those from workers of each role."""
        self.peers = peers
        self._readings = readings
        self._me = worker.me
        self._kv = worker.scheduler.kv
        self._thread = thread
        self._lenders = PeerLinks(worker.trust.open_channel, worker_pb2_grpc.WorkerStub)
        self._failed: dict[str, float] = {}  # incarnation |-> time.monotonic() of its last failure

    async def borrow(self, source: kv_pb2.PageSource, keys: Seq[PageKey]) -> None:
        """Read what the pool lacks of these pages and the source has. What cannot be read is not there; NoRoomError."""
        if time.monotonic() < self._failed.get(source.incarnation, -RECHECK_S) + RECHECK_S:
            return
        try:
            async with asyncio.timeout(BORROW_S):
                begin, end = -1, self._count_cached(keys)
                if source.tokens < end * self._kv.page_tokens + source.least:
                    return
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

    async def _borrow_part(self, source: kv_pb2.PageSource, keys: Seq[PageKey], begin: int) -> bool:
        """Read what one answer names. False: there is nothing more, or to compute it is faster."""
        num_tokens = min(source.tokens, len(keys) * self._kv.page_tokens) - begin * self._kv.page_tokens
        known = self.peers.find(source.incarnation)  # before the first loan nothing is known of it
        if num_tokens <= 0 or (known is not None and not self._find_reading(known).is_preferred(num_tokens)):
            return False
        reader = self._me if self.peers.wants_checksums else None
        request = worker_pb2.LendRequest(incarnation=source.incarnation, keys=keys, begin=begin, reader=reader)
        async with self._lenders.use(source.address) as lender:
            response: worker_pb2.LendResponse = await lender.Lend(request, timeout=LEND_S)
        num_pages, num_slots = len(response.offer.pages), len(response.offer.slots)
        if not num_pages or (self._kv.needs_draft and not response.has_draft[0]):
            return False
        most_slots = min(self._kv.states.cache.num_pages, 1)
        if num_pages != len(response.has_draft) or num_pages > len(keys) - begin or num_slots > most_slots:
            raise ReadError("bounds", f"{num_pages} pages and {num_slots} slots of {source.address} do not fit")
        known = await self.peers.shake_hands(response.peer)
        plan = plan_loan(keys, begin, num_pages, num_slots)
        await self._find_reading(known).fill(plan, partial(self._read, response, known))
        return True

    def _find_reading(self, known: KnownPeer) -> Reading:
        return self._readings["decode" if known.peer.role == "decode" else "prefill"]

    async def _read(
        self, response: worker_pb2.LendResponse, known: KnownPeer, restore: Restore
    ) -> tuple[Seq[bool], int]:
        await self.peers.read(response.offer, known, (restore.pages, restore.slots))
        return response.has_draft, len(restore.slots)

    async def close(self) -> None:
        await self._lenders.close()
