"""A process that owns a pool and obeys commands on stdin, to read another process's memory.

    python -m tests.support.pool_process [WORD ...] NUM_PAGES     prints its Peer, as JSON on a line
    recycle PAGE        gives the page a new owner and new bytes; prints []
    sum PAGE ...        prints the pages' checksums, as JSON

WORD: fake-gpu; ranks=SIZE of a worker, in one process; layers=NUMBER of large pages instead of small ones, then also
device=DEVICE; transport=NAME. It serves its pages by gRPC too. It ends when stdin does.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from google.protobuf.json_format import MessageToJson, Parse
from numpy.typing import NDArray

from engine.compose import open_device
from engine.cuda.gpu import Gpu
from engine.cuda.pool import GpuPool
from engine.kv.memory import create_file
from engine.kv.pool import Pool, PoolShape, PoolShare
from kvtransfer.checksums import compute_checksums
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.layout import build_layout
from kvtransfer.reader import Local
from kvtransfer.transports import describe_rank
from protos import kv_pb2
from runtime.rpc import bind, build_server, host_identity, open_channel
from tests.support.fake_cuda import FakeGpu
from tests.support.forks import ForkedPopen
from wire.kv_layout import KvPart, PagePart

PARTS = (PagePart(4, 512), PagePart(2, 256))  # of a page over all ranks
NUM_LAYERS = (2, 1)  # per part
WHOLE_BYTES = 4 * 512 + 2 * 256
COMMAND = (sys.executable, "-m", "tests.support.pool_process")
REPLY_S = 30.0  # longest wait for a reply of the process, and for a read


class Exporter:
    """The process, seen from another. Ends with the `with` block."""

    def __init__(self, command: Sequence[str], num_pages: int) -> None:
        self._process: subprocess.Popen[str] = ForkedPopen(
            [*command, str(num_pages)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.peer = Parse(self._read(), kv_pb2.Peer())

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            stream.close()

    def recycle(self, *pages: int) -> None:
        for page in pages:
            self._ask("recycle", page)

    def sum(self, *pages: int) -> list[int]:
        """Checksums of the pages."""
        return self._ask("sum", *pages)

    def kill(self) -> None:
        """kill -9, and wait for the end. Idempotent."""
        self._process.kill()
        self._process.wait(REPLY_S)

    def _ask(self, *words: object) -> list[int]:
        assert self._process.stdin
        print(*words, file=self._process.stdin, flush=True)
        return list(json.loads(self._read()))

    def _read(self) -> str:
        """The next line. If it takes too long, kills the process and fails."""
        assert self._process.stdout
        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(self._process.stdout.readline)
            try:
                return reading.result(REPLY_S)
            except TimeoutError:
                self._process.kill()
                raise


def page_content(page: int, generation: int, page_bytes: int) -> NDArray[np.uint8]:
    """The bytes that an owner writes to a page: different for each page and owner."""
    return ((np.arange(page_bytes) * 7 + page * 31 + generation * 101) % 251).astype(np.uint8)


def recycle(pool: Pool, page: int) -> None:
    """Like an allocator and an engine: change the generation first, then the bytes."""
    pool.generations[page] += 1
    pool.store([page], [page_content(page, int(pool.generations[page]), pool.page_bytes)])


def build_local(pool: Pool, name: str = "exporter", transport: str = "auto") -> Local:
    """For peers of this host; NIXL may use TCP."""
    return Local(pool, f"{name}.{pool.rank}", transport, open_channel, True, True, REPLY_S)


def describe(local: Local, address: str = "127.0.0.1:1") -> kv_pb2.Peer:
    """This process as its peers see it: incarnation "exporter". `address`: of its PageServer, if any."""
    pool = local.store
    assert isinstance(pool, Pool)
    shape, (part,) = pool.shape, pool.shape.parts
    assert isinstance(part, KvPart)
    layout = build_layout(
        weights="w", dtype=str(shape.dtype).removeprefix("torch."), num_layers=part.num_layers,
        num_kv_heads=part.num_heads, page_tokens=shape.page_tokens, head_dim=part.head_dim,
    )  # fmt: skip
    return kv_pb2.Peer(
        role="prefill", address=address, incarnation="exporter", pid=os.getpid(), host=host_identity(), layout=layout,
        num_pages=pool.num_pages, pool_fd=pool.fd, pages_offset=pool.pages_offset,
        ranks=[describe_rank(local, address)],
    )  # fmt: skip


def obey(pool: Pool, peer: kv_pb2.Peer, recycle_page: Callable[[int], None]) -> None:
    """Print this process's Peer, then obey commands until stdin ends."""
    print(MessageToJson(peer, indent=None), flush=True)
    for line in sys.stdin:
        word, *pages = line.split()
        if word == "recycle":
            recycle_page(int(pages[0]))
        sums = compute_checksums(pool, list(map(int, pages)), 0, pool.page_bytes) if word == "sum" else []
        print(json.dumps(sums), flush=True)


def build_pool(num_pages: int, gpu: Gpu | None = None) -> Pool:
    """A pool of small pages: 2 layers x 2 x 1 head x 4 tokens x 8 float32 = 512 bytes."""
    shape = PoolShape(num_pages, (KvPart(2, 1, 8),), 4, torch.float32)
    return Pool(shape) if gpu is None else GpuPool(shape, gpu)


def build_large_pool(num_layers: int, num_pages: int, device: torch.device) -> Pool:
    """Pages of 64 KiB a layer: 32 layers are those of an 8B model."""
    return open_device(device).build_pool(PoolShape(num_pages, (KvPart(num_layers, 8, 128),), 16, torch.bfloat16))


def build_ranks(num_pages: int, size: int, gpu: Gpu | None = None, is_spread: bool = False) -> list[Pool]:
    """The pools of all ranks of a worker, with pages of PARTS in one file; `is_spread`: on hosts of their own."""
    fd, pools = -1 if is_spread else create_file(), []
    for rank in range(size):
        shape, draft_shape = (
            PoolShape(num_pages, (KvPart(layers, max(part.num_heads // size, 1), 8),), 4, torch.float32)
            for part, layers in zip(PARTS, NUM_LAYERS, strict=True)
        )
        share = PoolShare(rank, size, PARTS, fd, barrier=lambda: None)  # rank 0 sizes it before the next is built
        pools.append(Pool(shape, draft_shape, share) if gpu is None else GpuPool(shape, gpu, draft_shape, share))
    return pools


def find_share(
    parts: Sequence[PagePart], page: NDArray[np.generic], rank: int, size: int, stages: int = 1
) -> NDArray[np.generic]:
    """A rank's share of a page: of each part, the heads that overlap its interval of [0, 1), and of those the layers of
    its stage, with zeros where a larger stage has one more. Rank 0 is in the last."""
    tp, stage = size // stages, stages - 1 - rank * stages // size
    rank, shares, begin = rank % tp, [], 0
    for num_heads, head_bytes, num_layers in parts:
        counts = [len(own) for own in np.array_split(np.arange(num_layers), stages)]
        layers = slice(sum(counts[:stage]), sum(counts[: stage + 1]))
        for head in range(num_heads):
            if head * tp < (rank + 1) * num_heads and rank * num_heads < (head + 1) * tp:
                own = page[begin : begin + head_bytes].reshape(num_layers, -1)[layers]
                shares.append(np.pad(own, ((0, counts[0] - len(own)), (0, 0))).reshape(-1))
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


async def main(*words: str) -> None:
    num_pages, options = int(words[-1]), dict(word.partition("=")[::2] for word in words[:-1])
    gpu = FakeGpu() if "fake-gpu" in options else None
    if "ranks" in options:
        pools = build_ranks(num_pages, int(options["ranks"]), gpu)
    elif "layers" in options:
        pools = [build_large_pool(int(options["layers"]), num_pages, torch.device(options.get("device", "cpu")))]
    else:
        pools = [build_pool(num_pages, gpu)]
    server = build_server()
    PageServer({"exporter": pools[0]}).add_to(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    locals_ = [build_local(pool, transport=options.get("transport", "auto")) for pool in pools]
    peer, *others = [describe(local, address) for local in locals_]
    peer.ranks.extend(other.ranks[0] for other in others)
    change = partial(recycle_ranks, pools) if "ranks" in options else partial(recycle, pools[0])
    await asyncio.to_thread(obey, pools[0], peer, change)
    await server.stop(None)
    for local in locals_:
        local.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
