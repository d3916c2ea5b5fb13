"""Workers whose pages we read: their readers, and all reads. Runs on the asyncio thread."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import structlog

from kvtransfer.checksums import parts_of
from kvtransfer.layout import find_bad_ranks, find_bad_states, find_mismatch
from kvtransfer.reader import PageRef, Reader, ReadError
from kvtransfer.transports import choose_transport
from protos import kv_pb2
from runtime.config import DecodeConfig, PrefillConfig
from runtime.tasks import keep_running
from worker.metrics import WorkerMetrics
from worker.peers.pools import RankedPool

log = structlog.get_logger()

PROBE_BYTES = 16 << 20  # enough for a steady rate, little enough to take milliseconds
LOOK_S = 1.0  # between checks for dead peers
MAX_PEERS = 256  # each takes mappings or connections, and a line of Status; more than there are workers of a role
MAX_GREETINGS = 64  # handshakes that run at once: each opens readers and reads PROBE_BYTES
Targets = tuple[list[int], list[int]]  # the pages and the slots that an offer is read to


class HandshakeRefusedError(Exception):
    """The peer's pages cannot be read here; the message names both values."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownPeer:
    """A worker that shook hands, or lends to us."""

    peer: kv_pb2.Peer
    readers: list[Reader]  # of its pages and, if there are states, of its slots
    why: str  # it is read by this transport
    bytes_per_s: float  # of a first large read

    @property
    def transport(self) -> str:
        return self.readers[0].transport

    async def close(self) -> None:
        for reader in self.readers:
            await reader.close()


class Landed(NamedTuple):
    """Bytes and seconds of one read."""

    num_bytes: int
    seconds: float


class KVPeers:
    """Owns the readers, one per address of a worker; a new incarnation replaces the old one.

    An incarnation has one address. Of MAX_PEERS the one that was idle for longest makes room.
    A reader keeps its peer's pool in memory: a dead peer's reader is closed within LOOK_S, or after its running read.
    """

    def __init__(
        self, me: kv_pb2.Peer, pools: Sequence[RankedPool], config: PrefillConfig | DecodeConfig,
        metrics: WorkerMetrics,
    ) -> None:  # fmt: skip
        self._me = me
        self._pools = pools
        self._metrics = metrics
        self.wants_checksums = config.verify_transfers
        self._wanted = config.transport
        self._is_required = config.require_transport
        self._known: dict[str, KnownPeer] = {}  # address |-> peer; the one used last is the last
        # address |-> held during a handshake; exists while a handshake runs or waits
        self._greeting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.reading: dict[asyncio.Task[Any] | None, KnownPeer] = {}  # task with a running read |-> its peer
        self._watching: asyncio.Task[None] | None = None  # while there are peers

    def find(self, incarnation: str) -> KnownPeer | None:
        """One whose pages are as ours: our weights may have changed since it was accepted."""
        known = next((known for known in self._known.values() if known.peer.incarnation == incarnation), None)
        return known if known and find_mismatch(self._me.layout, known.peer.layout) is None else None

    def transports(self) -> dict[str, str]:
        """Every peer's address |-> transport."""
        return {address: known.transport for address, known in self._known.items()}

    @property
    def read_token_s(self) -> float:
        """Seconds to read one token's KV from the slowest peer; 0 without peers."""
        slowest = min((known.bytes_per_s for known in self._known.values()), default=inf)
        return self._pools[0].own.all_page_bytes / self._pools[0].own.shape.page_tokens / slowest

    async def shake_hands(self, peer: kv_pb2.Peer) -> KnownPeer:
        """Compare layouts, open readers and measure. Idempotent per incarnation. Raises HandshakeRefusedError."""
        if peer.address not in self._greeting and len(self._greeting) >= MAX_GREETINGS:
            raise HandshakeRefusedError(f"{MAX_GREETINGS} handshakes are running: {peer.address} is to try again")
        async with self._greeting.setdefault(peer.address, asyncio.Lock()):
            known = self._known.get(peer.address)
            if known is None or self.find(peer.incarnation) is not known:
                known = await self._add(peer, known)
            self._mark_used(known)
            return known

    def _mark_used(self, known: KnownPeer) -> None:
        if self._known.get(known.peer.address) is known:
            self._known[known.peer.address] = self._known.pop(known.peer.address)

    async def _add(self, peer: kv_pb2.Peer, before: KnownPeer | None) -> KnownPeer:
        mismatch = find_mismatch(self._me.layout, peer.layout) or find_bad_states(self._me, peer)
        for ours, theirs in zip(self._pools, (peer, peer.states), strict=False):
            mismatch = mismatch or find_bad_ranks(ours.own.parts, theirs)
        mismatch = mismatch or self._find_other_address(peer)
        if mismatch is not None:
            raise HandshakeRefusedError(f"{peer.address} cannot hand over its KV: {mismatch}")
        try:
            known = await self._open(peer)
        except (ReadError, ValueError) as error:
            raise HandshakeRefusedError(f"cannot read from {peer.address}: {error}") from error
        if (late := self._find_other_address(peer)) is not None:
            await known.close()
            raise HandshakeRefusedError(f"{peer.address} cannot hand over its KV: {late}")
        forgotten = self._forget(lambda other: other is before or self._is_dead(other))
        idle = [other for other in self._known.values() if other not in self.reading.values()]
        surplus = idle[: max(0, len(self._known) + 1 - MAX_PEERS)]
        forgotten += self._forget(lambda other: other in surplus)
        self._known[peer.address] = known
        self._metrics.probed_bytes_per_s.labels(known.transport).set(known.bytes_per_s)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(keep_running(self._watch, "looking for dead peers"))
        log.info(
            "peer accepted", peer=peer.address, incarnation=peer.incarnation, transport=known.transport, why=known.why,
            gigabytes_per_s=round(known.bytes_per_s / 1e9, 2),
        )  # fmt: skip
        for old in forgotten:
            await old.close()
        return known

    def _find_other_address(self, peer: kv_pb2.Peer) -> str | None:
        other = self.find(peer.incarnation)
        if other is None or other.peer.address == peer.address:
            return None
        return f"incarnation {peer.incarnation} has shaken hands from {other.peer.address}"

    async def _open(self, peer: kv_pb2.Peer) -> KnownPeer:
        """Raises ReadError, or ValueError if the transport that is required is not possible."""
        transport, why = choose_transport(self._me, peer, self._wanted, self._is_required)
        wanted = transport if self._wanted == "auto" else self._wanted
        try:
            readers = await self._open_readers(transport, peer)
        except ReadError as error:
            if self._is_required:
                raise
            wanted, transport, why = transport, "grpc", f"{transport} failed: {error}"
            readers = await self._open_readers(transport, peer)
        if transport != wanted:
            log.warning(
                "transport differs from the requested one", peer=peer.address, asked=wanted,
                used=readers[0].transport, why=why,
            )  # fmt: skip
        return KnownPeer(peer, readers, why, await self._measure(readers, peer.num_pages))

    async def _open_readers(self, transport: str, peer: kv_pb2.Peer) -> list[Reader]:
        """Opens a reader of its pages and, by the same transport, of its slots."""
        readers: list[Reader] = []
        try:
            for ours, theirs in zip(self._pools, (peer, peer.states), strict=False):
                readers.append(await ours.open(transport, theirs))
        except BaseException:
            for reader in readers:
                await reader.close()
            raise
        return readers

    async def read(self, offer: kv_pb2.OfferRequest, known: KnownPeer, targets: Targets) -> Landed:
        """Read pages and slots and, if that is wanted, compare what landed with what was offered.

        The caller holds `targets`, as many as are offered, until this returns or raises, even if it is cancelled.
        Raises ReadError.
        """
        num_bytes, started, task = 0, time.perf_counter(), asyncio.current_task()
        self._check_sums(offer, known)
        self.reading[task] = known
        self._mark_used(known)
        try:
            for pool, reader, part, into in zip(self._pools, known.readers, parts_of(offer), targets, strict=False):
                if into:
                    await reader.read([PageRef(ref.page, ref.generation) for ref in part.refs], into)
                if into and self.wants_checksums:  # after the generations: a recycled page has other bytes too
                    way = f"{known.transport} from {known.peer.address}"
                    await pool.verify(offer, part, into, known.peer, way)
                num_bytes += len(into) * pool.own.all_page_bytes
        finally:
            del self.reading[task]
        landed = Landed(num_bytes, time.perf_counter() - started)
        self._metrics.transfer_bytes.labels(known.transport).inc(num_bytes)
        self._metrics.transfer_seconds.observe(landed.seconds)
        return landed

    def _check_sums(self, offer: kv_pb2.OfferRequest, known: KnownPeer) -> None:
        """Raise ReadError unless the offer has as many checksums as are wanted."""
        for pool, part in zip(self._pools if self.wants_checksums else [], parts_of(offer), strict=False):
            wanted = len(pool.plan_runs(known.peer)) * len(part.refs)
            if len(part.checksums) != wanted:
                found = f"{len(part.checksums)} checksums offered by {known.peer.address}, not {wanted}"
                raise ReadError("handshake", found)

    async def _measure(self, readers: list[Reader], num_pages: int) -> float:
        """Read the peer's first pages and drop them; returns bytes per second. Closes the readers if that fails."""
        page_bytes = self._pools[0].own.all_page_bytes
        num_pages = max(1, min(num_pages, PROBE_BYTES // page_bytes))
        started = time.perf_counter()
        try:
            await readers[0].probe(num_pages)
        except BaseException:  # cancelled too, if the peer stops waiting
            for reader in readers:
                await reader.close()
            raise
        return num_pages * page_bytes / (time.perf_counter() - started)

    async def _watch(self) -> None:
        """Forget dead peers until no peer is left. Handshakes alone would miss a peer that never returns."""
        while self._known:
            await asyncio.sleep(LOOK_S)
            for known in self._forget(self._is_dead):
                await known.close()

    def _is_dead(self, known: KnownPeer) -> bool:
        """Whether its process is dead, and no read of its pool is running."""
        return known not in self.reading.values() and any(reader.is_gone() for reader in known.readers)

    def _forget(self, is_meant: Callable[[KnownPeer], bool]) -> list[KnownPeer]:
        """Remove matching peers; the caller closes them."""
        forgotten = [address for address, known in self._known.items() if is_meant(known)]
        for address in forgotten:
            log.info("peer forgotten", peer=address, incarnation=self._known[address].peer.incarnation)
        return [self._known.pop(address) for address in forgotten]

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for known in self._known.values():
            await known.close()
