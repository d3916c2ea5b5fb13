"""Read speed of offered pages, for each transport between two processes of this host.

    python -m bench.transports [--rounds 9] [--verify]

A read is an offer's: pages at random places of the owner's pool into pages of ours, with generations compared. NIXL
runs twice: with UCX's own choice, and limited to TCP, as between hosts without RDMA. With --verify each read is
followed by one as with --verify-transfers, and the ratio of the two times is printed: the owner computes checksums of
the pages before, and we of ours after the read.
"""

import argparse
import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median

import torch

from engine.kv.pool import Pool
from kvtransfer.checksums import compute_checksums
from kvtransfer.reader import PageRef, Reader
from kvtransfer.transports import open_reader
from protos import kv_pb2
from tests.support.pool_process import COMMAND, Exporter, build_large_pool, build_local

NUM_PAGES, NUM_LAYERS = 256, 8  # 512 KiB a page
OFFERS = (1, 8, 32, 128)  # pages
NUM_WARM = 4  # large reads first: TCP grows its window
OWNER = (*COMMAND, "transport=nixl", f"layers={NUM_LAYERS}")


@asynccontextmanager
async def open_readers(peer: kv_pb2.Peer, pool: Pool) -> AsyncIterator[list[Reader]]:
    local, readers = build_local(pool, "reader"), list[Reader]()
    for name in ("shm", "nixl", "nixl over tcp", "grpc"):
        if name.endswith("tcp"):
            os.environ["UCX_TLS"] = "tcp,self"
        readers.append(await open_reader(local, name.split()[0], peer))
    for reader in readers * NUM_WARM:
        await reader.probe(OFFERS[-1])
    yield readers
    for reader in readers:
        await reader.close()
    local.close()


async def measure(owner: Exporter, num_rounds: int, is_verified: bool) -> None:
    """Prints a row per size of offer; with the ratios of verified to plain reads if `is_verified`."""
    pool, dice = build_large_pool(NUM_LAYERS, NUM_PAGES, torch.device("cpu")), random.Random(0)
    pool.tensor.normal_()

    async def time_read(reader: Reader, num_pages: int, is_verified: bool) -> float:
        pages, into = (dice.sample(range(NUM_PAGES), num_pages) for _ in range(2))
        started = time.perf_counter()
        theirs = await asyncio.to_thread(owner.sum, *pages) if is_verified else []
        await reader.read([PageRef(page, 0) for page in pages], into)
        if is_verified:
            assert await asyncio.to_thread(compute_checksums, pool, into, 0, pool.page_bytes) == theirs
        return time.perf_counter() - started

    async with open_readers(owner.peer, pool) as readers:
        print("| pages | MiB | " + " | ".join(reader.transport for reader in readers) + " |")
        print("|" + "---|" * (len(readers) + 2))
        for num_pages in OFFERS:
            times: dict[str, list[float]] = {reader.transport: [] for reader in readers}
            ratios: dict[str, list[float]] = {reader.transport: [] for reader in readers}
            for _ in range(num_rounds):
                for reader in readers:
                    plain = await time_read(reader, num_pages, False)
                    times[reader.transport].append(plain)
                    if is_verified:
                        ratios[reader.transport].append(await time_read(reader, num_pages, True) / plain)
            gigabytes = num_pages * pool.page_bytes / 1e9
            cells = [f"{gigabytes / median(row):.2f} ({median(row) * 1e3:.1f} ms)" for row in times.values()]
            if is_verified:
                cells = [f"{cell}, x {median(row):.2f}" for cell, row in zip(cells, ratios.values(), strict=True)]
            print(f"| {num_pages} | {num_pages * pool.page_bytes / 2**20:g} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--verify", action="store_true")
    arguments = parser.parse_args()
    with Exporter(OWNER, NUM_PAGES) as owner:
        asyncio.run(measure(owner, arguments.rounds, arguments.verify))


if __name__ == "__main__":
    main()
