"""A process that owns a pool and obeys commands on stdin, for tests that read another process's memory.

python -m bench.gpu_checks.ipc_exporter [nixl-|grpc-]DEVICE NUM_PAGES     prints its Peer, as JSON on one line
recycle PAGE                            gives the page a new owner and new bytes; prints "done"

It ends when stdin does.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from google.protobuf.json_format import MessageToJson
from numpy.typing import NDArray

from engine.kv.pool import Pool, PoolShape
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.layout import build_layout
from kvtransfer.reader import Local
from kvtransfer.transports import describe_rank
from protos import kv_pb2
from runtime.rpc import bind, build_server, host_identity, open_channel
from wire.kv_layout import KvPart

READ_S = 30.0
SHAPE_8B = PoolShape(1, (KvPart(32, 8, 128),), 16, torch.bfloat16)  # 2 MiB


def page_content(page: int, generation: int, page_bytes: int) -> NDArray[np.uint8]:
    """The bytes that an owner writes to a page: different for each page and owner."""
    return ((np.arange(page_bytes) * 7 + page * 31 + generation * 101) % 251).astype(np.uint8)


def recycle(pool: Pool, page: int) -> None:
    """Like an allocator and an engine: change the generation first, then the bytes."""
    pool.generations[page] += 1
    pool.store([page], [page_content(page, int(pool.generations[page]), pool.page_bytes)])


def build_local(pool: Pool, transport: str = "auto") -> Local:
    """For peers of this host."""
    return Local(pool, f"exporter.{pool.rank}", True, transport, open_channel, True, True, READ_S)


def describe(pool: Pool, local: Local, address: str = "127.0.0.1:1") -> kv_pb2.Peer:
    """This process as its peers see it: incarnation "exporter". `local`: kept open. `address`: of a PageServer."""
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


def obey(peer: kv_pb2.Peer, recycle_page: Callable[[int], None]) -> None:
    """Print this process's Peer, then obey commands until stdin ends."""
    print(MessageToJson(peer, indent=None), flush=True)
    for line in sys.stdin:
        recycle_page(int(line.split()[1]))
        print("done", flush=True)


async def serve(pool: Pool) -> None:
    """`obey`, while a PageServer gives pages to GrpcReaders."""
    server = build_server()
    PageServer({"exporter": pool}).add_to(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    await asyncio.to_thread(obey, describe(pool, build_local(pool), address), partial(recycle, pool))
    await server.stop(None)


if __name__ == "__main__":
    way, _, kind = sys.argv[1].rpartition("-")
    pool = Pool(SHAPE_8B.with_pages(int(sys.argv[2])), torch.device(kind))
    if way == "grpc":
        asyncio.run(serve(pool))
    else:
        local = build_local(pool, way or "auto")
        obey(describe(pool, local), partial(recycle, pool))
