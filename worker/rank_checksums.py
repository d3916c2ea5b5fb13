"""Checksums of pages over all ranks of a worker: each rank computes those of its own pool."""

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from kvtransfer.checksums import compute_checksums
from kvtransfer.reader import PageStore
from worker.rank_children import RankChildren


class PageBytes(NamedTuple):
    """Bytes of each page in one rank's pool."""

    rank: int
    begin: int
    num_bytes: int


async def compute_over_ranks(
    pool: PageStore, children: RankChildren | None, pages: Sequence[int], places: Sequence[PageBytes],
    is_states: bool = False,
) -> list[int]:  # fmt: skip
    """The checksums of all pages, or slots, at the first place, then at the second and so on. `pool`: rank 0's.

    Raises RuntimeError or ReadError if a GPU fails.
    """

    async def compute(place: PageBytes) -> list[int]:
        if place.rank == 0:
            return await asyncio.to_thread(compute_checksums, pool, pages, place.begin, place.num_bytes)
        assert children is not None
        return await children.compute_checksums(place.rank, pages, place.begin, place.num_bytes, is_states)

    return list(chain.from_iterable(await asyncio.gather(*map(compute, places))))
