"""Read speed of offered pages, for each transport between two processes of this host.

    python -m bench.transports [--rounds 9] [--verify]

A read is an offer's: pages at random places of the owner's pool into pages of ours, with generations compared. NIXL
runs twice: with UCX's own choice, and limited to TCP, as between hosts without RDMA. With --verify each read is
followed by one as with --verify-transfers, and the ratio of the two times is printed: the owner computes checksums of
the pages before, and we of ours after the read.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

import torch
from google.protobuf.json_format import MessageToJson, Parse

from bench.gpu_checks.ipc_exporter import build_local, describe
from engine.kv.pool import Pool, PoolShape
from kvtransfer.checksums import compute_checksums
from kvtransfer.grpc_bytes import GrpcReader, PageServer
from kvtransfer.nixl import NixlReader
from kvtransfer.reader import PageRef, Reader
from kvtransfer.shm import ShmReader
from protos import kv_pb2
from runtime.rpc import bind, build_server, open_channel
from wire.kv_layout import KvPart

SHAPE = PoolShape(256, (KvPart(16, 8, 64),), 16, torch.bfloat16)  # 512 KiB
OFFERS = (1, 8, 32, 128)  # pages
READ_S = 60.0
NUM_WARM = 4  # large reads first: TCP grows its window


async def own_pool() -> None:
    """The other process: prints its Peer, serves its pool, and answers lists of pages with checksums."""
    pool = build_pool()
    server = build_server()
    PageServer({"exporter": pool}).add_to(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    local = build_local(pool, "nixl")
    print(MessageToJson(describe(pool, local, f"127.0.0.1:{port}"), indent=None), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(compute_checksums(pool, json.loads(line), 0, pool.page_bytes)), flush=True)
    await server.stop(None)
    local.close()


def build_pool() -> Pool:
    pool = Pool(SHAPE, torch.device("cpu"))
    pool.tensor.normal_()
    return pool


@asynccontextmanager
async def open_readers(peer: kv_pb2.Peer, pool: Pool) -> AsyncIterator[list[Reader]]:
    with ThreadPoolExecutor(1) as executor:
        readers: list[Reader] = [ShmReader(peer, pool, executor)]
        for name in ("free", "tcp"):
            if name == "tcp":
                os.environ["UCX_TLS"] = "tcp,self"
            readers.append(await NixlReader.open(peer, name, True, pool, open_channel(peer.address), READ_S))
        readers.append(GrpcReader(peer, pool, open_channel, READ_S))
        for reader in readers * NUM_WARM:
            await reader.probe(OFFERS[-1])
        yield readers
        for reader in readers:
            await reader.close()


@dataclass(frozen=True, slots=True)
class Verified:
    """Reads as with --verify-transfers."""

    reader: Reader
    pool: Pool
    sum_theirs: Callable[[Sequence[int]], list[int]]  # in the owner's process

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        theirs = await asyncio.to_thread(self.sum_theirs, [source.page for source in sources])
        await self.reader.read(sources, into)
        assert await asyncio.to_thread(compute_checksums, self.pool, into, 0, self.pool.page_bytes) == theirs


async def measure(peer: kv_pb2.Peer, num_rounds: int, sum_theirs: Callable[[Sequence[int]], list[int]] | None) -> None:
    """Prints a row per size of offer; ratios of verified to plain reads if `sum_theirs` computes the checksums."""
    pool, dice = build_pool(), random.Random(0)

    async def time_read(reader: Reader | Verified, num_pages: int) -> float:
        sources = [PageRef(page, 0) for page in dice.sample(range(pool.num_pages), num_pages)]
        into = dice.sample(range(pool.num_pages), num_pages)
        started = time.perf_counter()
        await reader.read(sources, into)
        return time.perf_counter() - started

    async with open_readers(peer, pool) as readers:
        print("| pages | MiB | " + " | ".join(reader.transport for reader in readers) + " |")
        print("|" + "---|" * (len(readers) + 2))
        for num_pages in OFFERS:
            times: dict[str, list[float]] = {reader.transport: [] for reader in readers}
            ratios: dict[str, list[float]] = {reader.transport: [] for reader in readers}
            for _ in range(num_rounds):
                for reader in readers:
                    plain = await time_read(reader, num_pages)
                    times[reader.transport].append(plain)
                    if sum_theirs is not None:
                        verified = await time_read(Verified(reader, pool, sum_theirs), num_pages)
                        ratios[reader.transport].append(verified / plain)
            gigabytes = num_pages * pool.page_bytes / 1e9
            cells = [f"{gigabytes / median(row):.2f} ({median(row) * 1e3:.1f} ms)" for row in times.values()]
            if sum_theirs is not None:
                cells = [f"{cell}, x {median(row):.2f}" for cell, row in zip(cells, ratios.values(), strict=True)]
            print(f"| {num_pages} | {num_pages * pool.page_bytes / 2**20:g} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own:
        asyncio.run(own_pool())
        return
    command = [sys.executable, "-m", "bench.transports", "--own"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        asked, answered = owner.stdin, owner.stdout
        assert asked and answered

        def sum_theirs(pages: Sequence[int]) -> list[int]:
            print(json.dumps(pages), file=asked, flush=True)
            return list(json.loads(answered.readline()))

        peer = Parse(answered.readline(), kv_pb2.Peer())
        asyncio.run(measure(peer, arguments.rounds, sum_theirs if arguments.verify else None))
        asked.close()


if __name__ == "__main__":
    main()
