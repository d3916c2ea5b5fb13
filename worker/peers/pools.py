"""One pool of a worker, of pages or of slots, over all its ranks: described to peers, read into, and checksummed.

The other ranks do their part when rank 0 asks them.
"""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from engine.engine import Engine
from engine.kv.pool import Pool
from kvtransfer.checksums import OfferPart, check_checksums, compute_checksums
from kvtransfer.layout import Run, build_layout, plan_all_runs, stages_of
from kvtransfer.page_files import PageFiles, PageTiers, host_folder, identify
from kvtransfer.reader import Local, Reader
from kvtransfer.transports import describe_rank, open_reader
from protos import kv_pb2
from runtime import rpc
from runtime.addresses import is_loopback
from runtime.config import DecodeConfig, PrefillConfig
from runtime.settings import ConfigError
from runtime.trust import Trust
from wire.kv_layout import KvPart
from wire.page_keys import NamedPage
from wire.private_folders import UnsafeFolderError
from worker.peers.other_ranks import OtherRanks, find_failure

MAX_OFFER_BYTES = 64 << 20  # half a second at 1 Gbit/s; the next part is named after this one is read


class PageBytes(NamedTuple):
    """Bytes of each page in one rank's pool."""

    rank: int
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankedPool:
    """`others`: that this process leads; none in one of them."""

    incarnation: str  # what peers read it under
    own: Pool  # this rank's
    layout: kv_pb2.KvLayout
    local: Local
    others: OtherRanks
    is_states: bool
    tiers: PageTiers  # this rank's

    def describe(self, role: str, address: str, others: Sequence[kv_pb2.Rank]) -> kv_pb2.Peer:
        """The worker with this pool, for handshakes and Status. `others`: ranks 1 and up."""
        pool = self.own
        return kv_pb2.Peer(
            role=role, address=address, incarnation=self.incarnation, pid=os.getpid(), host=rpc.host_identity(),
            layout=self.layout, num_pages=pool.num_pages, pool_fd=pool.fd, pages_offset=pool.pages_offset,
            ranks=[describe_rank(self.local, address, rpc.host_identity()), *others], stages=pool.num_stages,
        )  # fmt: skip

    async def open(self, transport: str, peer: kv_pb2.Peer) -> Reader:
        """A reader for all ranks. `peer`: of its pages or slots, as this pool's are. Raises ReadError."""
        own = await open_reader(self.local, transport, peer)
        try:
            return await self.others.join(own, transport, peer, self.is_states)
        except BaseException:
            await own.close()
            raise

    def name(self, part: OfferPart, pages: Sequence[int]) -> None:
        """Add these pages as they are now: the caller holds them, or their owner's lock."""
        generations = self.own.generations
        part.refs.extend(kv_pb2.PageRef(page=page, generation=int(generations[page])) for page in pages)

    async def add_checksums(self, part: OfferPart, reader: kv_pb2.Peer) -> None:
        """Adds checksums of the named pages, for the ranks of a worker; none where it has none."""
        if reader.ranks:
            sizes, stages = (len(reader.ranks), self.own.num_ranks), (stages_of(reader), self.own.num_stages)
            runs = plan_all_runs(self.own.parts, *sizes, *stages)
            places = [PageBytes(run.rank, run.source, run.num_bytes) for _rank, run in runs]
            pages = [ref.page for ref in part.refs]
            part.checksums.extend(await self.compute_checksums(pages, places))

    def plan_runs(self, peer: kv_pb2.Peer) -> list[tuple[int, Run]]:
        """The runs of bytes that our ranks read from a peer's, and of which an offer has checksums."""
        own = self.own
        return plan_all_runs(own.parts, own.num_ranks, len(peer.ranks), own.num_stages, stages_of(peer))

    async def verify(
        self, offer: kv_pb2.OfferRequest, part: OfferPart, into: Sequence[int], peer: kv_pb2.Peer, way: str
    ) -> None:
        """Compare what landed in our ranks' pools with what `peer` offered. Raises ReadError("checksum")."""
        runs = self.plan_runs(peer)
        landed = await self.compute_checksums(into, [PageBytes(rank, run.target, run.num_bytes) for rank, run in runs])
        check_checksums(offer, part, self.layout.page_tokens, runs, landed, way)

    async def save(self, entries: Sequence[NamedPage], writer: Executor) -> int:
        """PageTiers.save of each rank; returns how many this one wrote. Raises ReadError."""
        writing = asyncio.get_running_loop().run_in_executor(writer, self.tiers.save, entries)
        await self.others.save(entries, self.is_states)
        return await writing

    async def restore(self, keys: Sequence[bytes], into: Sequence[int]) -> list[bool]:
        """PageTiers.load of each rank: what all of them read. Raises ReadError."""
        reading: Coroutine[Any, Any, list[bool]] = asyncio.to_thread(self.tiers.load, keys, into)
        others = self.others.restore(keys, into, self.is_states)
        results = await asyncio.gather(reading, *others, return_exceptions=True)  # all have ended: none writes any more
        read = [result for result in results if not isinstance(result, BaseException)]
        failure = find_failure([result for result in results if isinstance(result, BaseException)])
        if failure is not None:
            raise failure
        return [all(drafts) for drafts in zip(*read, strict=False)]

    async def compute_checksums(self, pages: Sequence[int], places: Sequence[PageBytes]) -> list[int]:
        """The checksums of all pages at the first place, then at the second and so on; each rank computes its own.

        Raises RuntimeError or ReadError if a GPU fails.
        """

        async def compute(place: PageBytes) -> list[int]:
            rank, begin, num_bytes = place
            if rank == 0:
                return await asyncio.to_thread(compute_checksums, self.own, pages, begin, num_bytes)
            return await self.others.compute_checksums(rank, pages, begin, num_bytes, self.is_states)

        return list(chain.from_iterable(await asyncio.gather(*map(compute, places))))


def build_pools(
    engine: Engine, config: PrefillConfig | DecodeConfig, incarnation: str, trust: Trust, others: OtherRanks
) -> list[RankedPool]:  # fmt: skip
    """The engine's pages and, of a model with states, its slots. What first parts do not show follows from the weights.

    `incarnation`: of the worker.
    """

    def build(pool: Pool, incarnation: str, layout: kv_pb2.KvLayout, is_states: bool) -> RankedPool:
        local = Local(
            pool, f"{incarnation}.{pool.rank}", config.transport, trust.open_channel, is_loopback(config.host),
            config.nixl_allow_tcp, config.lease_s,
        )  # fmt: skip
        tiers = _build_tiers(config, pool, layout, engine)
        return RankedPool(incarnation, pool, layout, local, others, is_states, tiers)

    pool, states, first = engine.pool, engine.states, engine.pool.shape.parts[0]
    assert isinstance(first, KvPart)
    layout = build_layout(
        weights=engine.weights, dtype=engine.kv_dtype, num_layers=pool.parts[0].num_layers,
        num_kv_heads=pool.parts[0].num_heads, page_tokens=pool.shape.page_tokens, head_dim=first.head_dim,
        draft_weights=engine.draft_weights if engine.has_draft_kv else "", computed=engine.dtype,
    )  # fmt: skip
    pools = [build(pool, incarnation, layout, is_states=False)]
    if states is not None:
        kept = engine.config.state_parts[0]
        layout = build_layout(
            weights=engine.weights, dtype="float32", num_layers=kept.num_layers,
            num_kv_heads=states.parts[0].num_heads, page_tokens=states.shape.page_tokens, head_dim=kept.sizes[-1],
        )  # fmt: skip
        pools.append(build(states, f"{incarnation}/states", layout, is_states=True))
    return pools


def _build_tiers(
    config: PrefillConfig | DecodeConfig, pool: Pool, layout: kv_pb2.KvLayout, engine: Engine
) -> PageTiers:
    """Pages and slots, and the ranks, share what the worker may take. Raises ConfigError if a folder cannot be used."""
    has_states, described = engine.states is not None, layout.SerializeToString(deterministic=True)
    pages_of = identify(described, engine.dtype, pool.parts, pool.rank, pool.num_ranks, pool.num_stages)
    tiers = []
    for option, root, gib in (
        ("kv_host_gib", host_folder(), config.kv_host_gib),
        ("kv_disk", Path(config.kv_disk).expanduser(), config.kv_disk_gib if config.kv_disk else 0),
    ):
        try:
            if gib:
                tiers.append(PageFiles(root, pages_of, (gib << 30) // (1 + has_states) // pool.num_ranks))
        except OSError as error:
            why = error.strerror if isinstance(error, UnsafeFolderError) else f"{root}: {error.strerror}"
            raise ConfigError(f"{option}={getattr(config, option)} cannot be used: {why}") from error
    return PageTiers(pool, tiers)
