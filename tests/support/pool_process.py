"""The process of bench/gpu_checks/ipc_exporter.py with small pages, for tests that read another process's memory.

python -m tests.support.pool_process [fake-gpu] [nixl] [ranks=SIZE] NUM_PAGES     SIZE ranks of a worker, in one process
"""

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu_checks.ipc_exporter import build_local, describe, obey, page_content, recycle
from engine.kv.gpu import Gpu
from engine.kv.pool import Pool, PoolShape, PoolShare, create_file
from tests.support.fake_cuda import FakeGpu
from wire.kv_layout import KvPart, PagePart

PARTS = (PagePart(4, 512), PagePart(2, 256))  # of a page over all ranks
NUM_LAYERS = (2, 1)  # per part
WHOLE_BYTES = 4 * 512 + 2 * 256


def build_pool(num_pages: int, gpu: Gpu | None = None) -> Pool:
    """A pool of small pages: 2 layers x 2 x 1 head x 4 tokens x 8 float32 = 512 bytes."""
    return Pool(PoolShape(num_pages, (KvPart(2, 1, 8),), 4, torch.float32), torch.device("cpu"), gpu=gpu)


def build_ranks(num_pages: int, size: int, gpu: Gpu | None = None) -> list[Pool]:
    """The pools of all ranks of a worker, with pages of PARTS in one file."""
    fd, pools = create_file(), []
    for rank in range(size):
        shape, draft_shape = (
            PoolShape(num_pages, (KvPart(layers, max(part.num_heads // size, 1), 8),), 4, torch.float32)
            for part, layers in zip(PARTS, NUM_LAYERS, strict=True)
        )
        share = PoolShare(rank, size, PARTS, fd, barrier=lambda: None)  # rank 0 sizes it before the next is built
        pools.append(Pool(shape, torch.device("cpu"), draft_shape, gpu, share))
    return pools


def find_share(parts: Sequence[PagePart], page: NDArray[np.generic], rank: int, size: int) -> NDArray[np.generic]:
    """A rank's share of a page: of each part, the heads that overlap its interval of [0, 1)."""
    shares, begin = [], 0
    for num_heads, head_bytes in parts:
        for head in range(num_heads):
            if head * size < (rank + 1) * num_heads and rank * num_heads < (head + 1) * size:
                shares.append(page[begin : begin + head_bytes])
            begin += head_bytes
    return np.concatenate(shares)


def find_share_of_page(page: int, generation: int, pool: Pool) -> NDArray[np.uint8]:
    """The content of a page in a rank's pool after `recycle_ranks`."""
    whole = page_content(page, generation, WHOLE_BYTES)
    return find_share(PARTS, whole, pool.rank, pool.num_ranks).astype(np.uint8)


def recycle_ranks(pools: Sequence[Pool], page: int) -> None:
    """Like `recycle`: rank 0 changes the generation, then each rank its bytes."""
    pools[0].generations[page] += 1
    for pool in pools:
        pool.store([page], [find_share_of_page(page, int(pool.generations[page]), pool)])


def main(*words: str) -> None:
    num_pages, gpu = int(words[-1]), FakeGpu() if "fake-gpu" in words else None
    sizes = [int(word.removeprefix("ranks=")) for word in words if word.startswith("ranks=")]
    pools = build_ranks(num_pages, sizes[0], gpu) if sizes else [build_pool(num_pages, gpu)]
    locals_ = [build_local(pool, transport="nixl" if "nixl" in words else "auto") for pool in pools]
    peer, *others = [describe(local) for local in locals_]
    peer.ranks.extend(other.ranks[0] for other in others)
    obey(pools[0], peer, partial(recycle_ranks, pools) if sizes else partial(recycle, pools[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
