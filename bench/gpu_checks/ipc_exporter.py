"""A process that owns a pool and obeys commands on stdin, for tests that read another process's memory.

python -m bench.gpu_checks.ipc_exporter [nixl-|grpc-]DEVICE NUM_PAGES     prints its Peer, as JSON on one line
recycle PAGE                            gives the page a new owner and new bytes; prints "done"

It ends when stdin does.
"""

import asyncio
import os
import sys

import numpy as np
import torch
from google.protobuf.json_format import MessageToJson
from numpy.typing import NDArray

from engine.kv.pool import Pool, PoolShape
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.identity import PoolFacts, build_peer, build_rank
from kvtransfer.nixl_pool import NixlPool
from protos import kv_pb2
from runtime.rpc import bind, build_server, host_identity
from wire.kv_layout import KvPart
from worker.process import describe_gpu

SHAPE_8B = PoolShape(1, (KvPart(32, 8, 128),), 16, torch.bfloat16)  # 2 MiB


def page_content(page: int, generation: int, page_bytes: int) -> NDArray[np.uint8]:
    """The bytes that an owner writes to a page: different for each page and owner."""
    return ((np.arange(page_bytes) * 7 + page * 31 + generation * 101) % 251).astype(np.uint8)


def recycle(pool: Pool, page: int) -> None:
    """Like an allocator and an engine: change the generation first, then the bytes."""
    pool.generations[page] += 1
    pool.store([page], [page_content(page, int(pool.generations[page]), pool.page_bytes)])


def describe(pool: Pool, nixl: NixlPool | None = None, address: str = "127.0.0.1:1") -> kv_pb2.Peer:
    """This process as its peers see it. `nixl`: of incarnation "exporter". `address`: of its PageServer, if any."""
    shape, (part,) = pool.shape, pool.shape.parts
    assert isinstance(part, KvPart)
    facts = PoolFacts(
        "w", str(shape.dtype).removeprefix("torch."), part.num_layers, part.num_heads, shape.page_tokens,
        part.head_dim, pool.num_pages, pool.fd, pool.pages_offset,
    )  # fmt: skip
    rank = build_rank(address, os.getpid(), describe_gpu(pool), nixl.facts if nixl else None)
    return build_peer("prefill", address, "exporter", host_identity(), facts, [rank])


def obey(pool: Pool, nixl: NixlPool | None = None, *address: str) -> None:
    """Print this process's Peer, then obey commands until stdin ends."""
    print(MessageToJson(describe(pool, nixl, *address), indent=None), flush=True)
    for line in sys.stdin:
        recycle(pool, int(line.split()[1]))
        print("done", flush=True)


async def serve(pool: Pool) -> None:
    """`obey`, while a PageServer gives pages to GrpcReaders."""
    server = build_server()
    PageServer({"exporter": pool}).add_to(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    await asyncio.to_thread(obey, pool, None, f"127.0.0.1:{port}")
    await server.stop(None)


if __name__ == "__main__":
    way, _, kind = sys.argv[1].rpartition("-")
    pool = Pool(SHAPE_8B.with_pages(int(sys.argv[2])), torch.device(kind))
    if way == "grpc":
        asyncio.run(serve(pool))
    else:
        obey(pool, NixlPool("exporter", pool, is_local=True) if way == "nixl" else None)
