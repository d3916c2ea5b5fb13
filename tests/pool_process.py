"""A process that owns a pool and obeys lines on its stdin, so that tests can read another process's memory.

python -m tests.pool_process NUM_PAGES     prints {"pid": …, "fd": …}
recycle PAGE                               gives the page a new owner and new bytes; prints "done"
"""

import json
import os
import sys

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kvcache.pool import Pool, PoolShape


def build_pool(num_pages: int) -> Pool:
    """A pool of small pages: 2 layers x 2 x 1 head x 4 tokens x 8 float32 = 512 bytes."""
    return Pool(PoolShape(num_pages, 2, 1, 4, 8, torch.float32), torch.device("cpu"))


def page_content(page: int, generation: int, page_bytes: int) -> NDArray[np.uint8]:
    """What an owner writes into a page: other bytes for each page and each owner."""
    return ((np.arange(page_bytes) * 7 + page * 31 + generation * 101) % 251).astype(np.uint8)


def recycle(pool: Pool, page: int) -> None:
    """As an allocator and an engine would: first the generation changes, then the bytes."""
    pool.generations[page] += 1
    pool.store([page], [page_content(page, int(pool.generations[page]), pool.page_bytes)])


def main() -> None:
    pool = build_pool(int(sys.argv[1]))
    for page in range(pool.num_pages):
        recycle(pool, page)
    print(json.dumps({"pid": os.getpid(), "fd": pool.fd}), flush=True)
    for line in sys.stdin:
        recycle(pool, int(line.split()[1]))
        print("done", flush=True)


if __name__ == "__main__":
    main()
