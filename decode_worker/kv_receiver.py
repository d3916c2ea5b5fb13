"""Offers of prefill workers, from the handshake to pages in our pool. Runs on the asyncio thread."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple
from weakref import WeakValueDictionary

import structlog

from decode_worker.metrics import DecodeMetrics
from kvtransfer.checksums import check_checksums, check_slot_checksums
from kvtransfer.layout import Run, find_bad_ranks, find_bad_states, find_mismatch, plan_all_runs
from kvtransfer.nixl_agent import find_obstacle
from kvtransfer.reader import PageRef, Reader, ReadError, Transport, choose_transport
from protos import kv_pb2
from runtime.config import DecodeConfig
from worker.process import Worker, build_opener, name_pools
from worker.rank_checksums import PageBytes, compute_over_ranks
from worker.rank_reads import RanksReader
from worker.scheduler import OfferRefusedError
from worker.thread import EngineThread

log = structlog.get_logger()

PROBE_BYTES = 16 << 20  # enough for a steady rate, little enough to take milliseconds
LOOK_S = 1.0  # between checks for dead peers


class HandshakeRefusedError(Exception):
    """The peer's pages cannot be read here; the message names both values."""


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A prefill worker that shook hands."""

    peer: kv_pb2.Peer
    readers: list[Reader]  # of its pages and, if there are states, of its slots
    why: str  # it is read by this transport
    bytes_per_s: float  # of a first large read
    runs: list[list[tuple[int, Run]]]  # of each reader, (our rank, run): what checksums are of; empty: not verified

    @property
    def transport(self) -> str:
        return self.readers[0].transport


class Targets(NamedTuple):
    """Where an offer is read to."""

    pages: list[int]
    slots: list[int]


class KVReceiver:
    """Owns the readers, one per prefill worker address; a new incarnation replaces the old one.

    A reader keeps its peer's pool in memory: a dead peer's reader is closed within LOOK_S, or after its running read.
    """

    def __init__(self, worker: Worker, config: DecodeConfig, thread: EngineThread, metrics: DecodeMetrics) -> None:
        self._me = worker.me
        self._pool = worker.engine.pool
        self._scheduler = worker.scheduler
        self._thread = thread
        self._metrics = metrics
        self._transport = config.transport
        self._is_transport_required = config.require_transport
        self.wants_checksums = config.verify_transfers
        names = name_pools(worker.engine, worker.me.incarnation)
        self._pools = list(names.values())  # pages and, if there are states, slots
        self._openers = [build_opener(f"{name}.0", config, pool, worker.trust) for name, pool in names.items()]
        self._children = worker.children
        self._peers: dict[str, KnownPeer] = {}  # address |-> peer
        # address |-> held during a handshake; exists while a handshake runs or waits
        self._greeting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reads: dict[asyncio.Future[kv_pb2.OfferResponse], KnownPeer] = {}  # running read |-> its peer
        self._watching: asyncio.Task[None] | None = None  # while there are peers

    def transports(self) -> dict[str, str]:
        """Every peer's address |-> transport."""
        return {address: known.transport for address, known in self._peers.items()}

    def transport_reasons(self) -> dict[str, str]:
        """Every peer's address |-> why it is read by its transport."""
        return {address: known.why for address, known in self._peers.items()}

    @property
    def read_token_s(self) -> float:
        """Seconds to read one token's KV from the slowest peer; 0 without peers."""
        slowest = min((known.bytes_per_s for known in self._peers.values()), default=inf)
        return self._pool.all_page_bytes / self._pool.shape.page_tokens / slowest

    def probed_bytes_per_s(self) -> dict[str, float]:
        """Every peer's address |-> bytes per second of a first large read."""
        return {address: known.bytes_per_s for address, known in self._peers.items()}

    async def shake_hands(self, peer: kv_pb2.Peer) -> str:
        """Compare layouts, open a reader and measure it. Returns the transport. Idempotent per incarnation."""
        async with self._greeting.setdefault(peer.address, asyncio.Lock()):
            return await self._shake_hands(peer)

    async def _shake_hands(self, peer: kv_pb2.Peer) -> str:
        known = self._peers.get(peer.address)
        if known is not None and known.peer.incarnation == peer.incarnation:
            return known.transport
        mismatch = find_mismatch(self._me.layout, peer.layout) or find_bad_states(self._me, peer)
        for pool, one in zip(self._pools, (peer, peer.states), strict=False):
            mismatch = mismatch or find_bad_ranks(pool.parts, one)
        if mismatch is not None:
            raise HandshakeRefusedError(f"{peer.address} cannot hand over its KV: {mismatch}")
        try:
            readers, why = await self._open_readers(peer)
            rate = await self._measure(readers, peer)
        except (ReadError, ValueError) as error:
            raise HandshakeRefusedError(f"cannot read from {peer.address}: {error}") from error
        forgotten = self._forget(lambda other: other is known or self._is_dead(other))
        runs = [
            plan_all_runs(pool.parts, pool.num_ranks, len(peer.ranks)) if self.wants_checksums else []
            for pool in self._pools
        ]
        known = self._peers[peer.address] = KnownPeer(peer, readers, why, rate, runs)
        self._metrics.probed_bytes_per_s.labels(known.transport).set(rate)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        log.info(
            "peer accepted", peer=peer.address, incarnation=peer.incarnation, transport=known.transport, why=why,
            gigabytes_per_s=round(rate / 1e9, 2),
        )  # fmt: skip
        for old in forgotten:
            await old.close()
        return known.transport

    async def _watch(self) -> None:
        """Forget dead peers until no peer is left. Handshakes alone would miss a peer that never returns."""
        while self._peers:
            await asyncio.sleep(LOOK_S)
            for reader in self._forget(self._is_dead):
                await reader.close()

    def _is_dead(self, known: KnownPeer) -> bool:
        """Whether its process is dead, and no read of its pool is running."""
        return known not in self._reads.values() and any(reader.is_gone() for reader in known.readers)

    def _forget(self, is_meant: Callable[[KnownPeer], bool]) -> list[Reader]:
        """Remove matching peers; the caller closes the returned readers."""
        forgotten = [address for address, known in self._peers.items() if is_meant(known)]
        for address in forgotten:
            log.info("peer forgotten", peer=address, incarnation=self._peers[address].peer.incarnation)
        return [reader for address in forgotten for reader in self._peers.pop(address).readers]

    async def _open_readers(self, peer: kv_pb2.Peer) -> tuple[list[Reader], str]:
        """Of its pages, and of its slots by the same transport."""
        transport, why = choose_transport(
            self._me, peer, self._transport, self._is_transport_required, find_obstacle()
        )  # fmt: skip
        wanted = transport if self._transport == "auto" else self._transport
        try:
            readers = await self._open_all(transport, peer)
        except ReadError as error:
            if self._is_transport_required:
                raise
            wanted, transport, why = transport, "grpc", f"{transport} failed: {error}"
            readers = await self._open_all(transport, peer)
        if transport != wanted:
            log.warning(
                "transport differs from the requested one", peer=peer.address, asked=wanted, used=readers[0].transport,
                why=why,
            )  # fmt: skip
        return readers, why

    async def _open_all(self, transport: Transport, peer: kv_pb2.Peer) -> list[Reader]:
        readers: list[Reader] = []
        try:
            for number, one in zip(range(len(self._pools)), (peer, peer.states), strict=False):
                readers.append(await self._open(transport, one, is_states=bool(number)))
        except BaseException:
            for reader in readers:
                await reader.close()
            raise
        return readers

    async def _open(self, transport: Transport, peer: kv_pb2.Peer, is_states: bool) -> Reader:
        """Open a reader for all ranks of this worker. Raises ReadError."""
        own = await self._openers[is_states].open(transport, peer)
        if self._children is None:
            return own
        try:
            return RanksReader([own, *await self._children.open(transport, peer, is_states)])
        except BaseException:
            await own.close()
            raise

    async def _measure(self, readers: list[Reader], peer: kv_pb2.Peer) -> float:
        """Read the peer's first pages and drop them; returns bytes per second. Closes the readers if that fails."""
        page_bytes = self._pool.all_page_bytes
        num_pages = max(1, min(peer.num_pages, PROBE_BYTES // page_bytes))
        started = time.perf_counter()
        try:
            await readers[0].probe(num_pages)
        except BaseException:  # cancelled too, if the peer stops waiting
            for reader in readers:
                await reader.close()
            raise
        return num_pages * page_bytes / (time.perf_counter() - started)

    async def take(self, offer: kv_pb2.OfferRequest) -> kv_pb2.OfferResponse:
        """Read offered pages into their session. The response acknowledges them or gives the reason against it."""
        try:
            known, targets = self._begin(offer)
        except OfferRefusedError as error:
            return self._refuse(offer, error.reason, error.detail)
        # not cancelled with the call: the session's pages are leased until the copy ends
        task = asyncio.ensure_future(self._read(offer, known, targets))
        self._reads[task] = known
        task.add_done_callback(self._reads.pop)
        return await asyncio.shield(task)

    def renew(self, ticket: kv_pb2.Ticket) -> None:
        """Extend the lease of the ticket's session. Raises OfferRefusedError."""
        self._check_ticket(ticket)
        with self._thread.lock:
            self._scheduler.renew(ticket.session, ticket.attempt, time.monotonic())

    def _check_ticket(self, ticket: kv_pb2.Ticket) -> None:
        if ticket.incarnation != self._me.incarnation:
            raise OfferRefusedError(
                "incarnation", f"ticket of incarnation {ticket.incarnation}; this worker is {self._me.incarnation}"
            )

    def _begin(self, offer: kv_pb2.OfferRequest) -> tuple[KnownPeer, Targets]:
        """Check the offer against peer and session. Returns the peer, and what to read into (`begin_read`)."""
        ticket = offer.ticket
        self._check_ticket(ticket)
        known = next((peer for peer in self._peers.values() if peer.peer.incarnation == offer.incarnation), None)
        if known is None:
            raise OfferRefusedError("handshake", f"incarnation {offer.incarnation} has not shaken hands here")
        for runs, refs, checksums in zip(
            known.runs, (offer.pages, offer.slots), (offer.checksums, offer.slot_checksums), strict=False
        ):
            if runs and len(checksums) != len(runs) * len(refs):
                wanted = f"{len(checksums)} checksums offered by {known.peer.address}, not {len(runs) * len(refs)}"
                raise OfferRefusedError("handshake", wanted)
        with self._thread.lock:
            targets = self._scheduler.begin_read(
                ticket.session, ticket.attempt, offer.begin, offer.end, len(offer.pages), len(offer.slots)
            )
        return known, Targets(*targets)

    async def _read(self, offer: kv_pb2.OfferRequest, known: KnownPeer, targets: Targets) -> kv_pb2.OfferResponse:
        session = offer.ticket.session
        started = time.perf_counter()
        try:
            for reader, refs, into in zip(known.readers, (offer.pages, offer.slots), targets, strict=False):
                if into:
                    await reader.read([PageRef(ref.page, ref.generation) for ref in refs], into)
            if self.wants_checksums:  # after the generations: a page that was recycled has other bytes too
                await self._verify(offer, known, targets)
        except Exception as error:
            with self._thread.lock:
                self._scheduler.fail_read(session)
                self._thread.wake()
            if isinstance(error, ReadError):
                return self._refuse(offer, error.reason, error.detail)
            log.exception("reading offered pages failed", request_id=offer.request_id)
            return self._refuse(offer, "transport", str(error))
        seconds = time.perf_counter() - started
        with self._thread.lock:
            self._scheduler.finish_read(session, offer.end, time.monotonic(), len(targets.slots))
            self._thread.wake()
        num_bytes = sum(len(into) * pool.all_page_bytes for pool, into in zip(self._pools, targets, strict=False))
        self._metrics.offers_accepted.inc()
        self._metrics.transfer_bytes.labels(known.transport).inc(num_bytes)
        self._metrics.transfer_seconds.observe(seconds)
        return kv_pb2.OfferResponse(accepted=True, bytes=num_bytes, seconds=seconds)

    async def _verify(self, offer: kv_pb2.OfferRequest, known: KnownPeer, targets: Targets) -> None:
        """Compare what landed in our ranks' pools with what was offered. Raises ReadError("checksum")."""
        way = f"{known.transport} from {known.peer.address}"
        for number, (pool, runs, into) in enumerate(zip(self._pools, known.runs, targets, strict=False)):
            places = [PageBytes(rank, run.target, run.num_bytes) for rank, run in runs]
            landed = await compute_over_ranks(pool, self._children, into, places, is_states=bool(number))
            if number:
                check_slot_checksums(offer, runs, landed, way)
            else:
                check_checksums(offer, self._me.layout.page_tokens, runs, landed, way)

    def _refuse(self, offer: kv_pb2.OfferRequest, reason: str, detail: str) -> kv_pb2.OfferResponse:
        self._metrics.offers_refused.labels(reason).inc()
        report = log.error if reason == "checksum" else log.warning
        report("offer refused", request_id=offer.request_id, reason=reason, detail=detail)
        return kv_pb2.OfferResponse(accepted=False, reason=reason, detail=detail)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for known in self._peers.values():
            for reader in known.readers:
                await reader.close()
        for opener in self._openers:
            opener.close()
