"""One pool of a worker, of pages or of slots, over all its ranks: described to peers, read into, and checksummed.

The other ranks' processes do their part when rank 0 asks them (rank_children.py).
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from engine.engine import Engine
from engine.kv.pool import Pool
from kvtransfer.checksums import PageBytes, compute_checksums
from kvtransfer.layout import build_layout
from kvtransfer.reader import Local, Reader
from kvtransfer.transports import describe_rank, open_reader
from protos import kv_pb2
from runtime import rpc
from runtime.addresses import is_loopback
from runtime.config import DecodeConfig, PrefillConfig
from runtime.trust import Trust
from wire.kv_layout import KvPart
from worker.rank_children import RankChildren
from worker.rank_reads import RanksReader


@dataclass(frozen=True, slots=True)
class RankedPool:
    """`children`: the other ranks; None if there are none, or in one of them."""

    incarnation: str  # what peers read it under
    pool: Pool  # this rank's
    layout: kv_pb2.KvLayout
    local: Local
    children: RankChildren | None
    is_states: bool

    def describe(self, role: str, address: str, others: Sequence[kv_pb2.Rank]) -> kv_pb2.Peer:
        """The worker with this pool, for handshakes and Status. `others`: ranks 1 and up."""
        pool = self.pool
        return kv_pb2.Peer(
            role=role, address=address, incarnation=self.incarnation, pid=os.getpid(), host=rpc.host_identity(),
            layout=self.layout, num_pages=pool.num_pages, pool_fd=pool.fd, pages_offset=pool.pages_offset,
            ranks=[describe_rank(self.local, address), *others],
        )  # fmt: skip

    async def open(self, transport: str, peer: kv_pb2.Peer) -> Reader:
        """A reader for all ranks. `peer`: of its pages or slots, as this pool's are. Raises ReadError."""
        own = await open_reader(self.local, transport, peer)
        if self.children is None:
            return own
        try:
            return RanksReader([own, *await self.children.open(transport, peer, self.is_states)])
        except BaseException:
            await own.close()
            raise

    async def compute_checksums(self, pages: Sequence[int], places: Sequence[PageBytes]) -> list[int]:
        """The checksums of all pages at the first place, then at the second and so on; each rank computes its own.

        Raises RuntimeError or ReadError if a GPU fails.
        """

        async def compute(place: PageBytes) -> list[int]:
            if place.rank == 0:
                return await asyncio.to_thread(compute_checksums, self.pool, pages, place.begin, place.num_bytes)
            assert self.children is not None
            return await self.children.compute_checksums(
                place.rank, pages, place.begin, place.num_bytes, self.is_states
            )

        return list(chain.from_iterable(await asyncio.gather(*map(compute, places))))


def build_pools(
    engine: Engine, config: PrefillConfig | DecodeConfig, incarnation: str, trust: Trust,
    children: RankChildren | None = None,
) -> list[RankedPool]:  # fmt: skip
    """The engine's pages and, of a model with states, its slots. What first parts do not show follows from the weights.

    `incarnation`: of the worker.
    """

    def build(pool: Pool, incarnation: str, layout: kv_pb2.KvLayout, is_states: bool) -> RankedPool:
        local = Local(
            pool, f"{incarnation}.{pool.rank}", isinstance(config, PrefillConfig), config.transport,
            trust.open_channel, is_loopback(config.host), isinstance(config, DecodeConfig) and config.nixl_allow_tcp,
            config.lease_s,
        )  # fmt: skip
        return RankedPool(incarnation, pool, layout, local, children, is_states)

    pool, states, first = engine.pool, engine.states, engine.pool.shape.parts[0]
    assert isinstance(first, KvPart)
    layout = build_layout(
        weights=engine.weights, dtype=engine.kv_dtype, num_layers=first.num_layers,
        num_kv_heads=pool.parts[0].num_heads, page_tokens=pool.shape.page_tokens, head_dim=first.head_dim,
        draft_weights=engine.draft_weights,
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
