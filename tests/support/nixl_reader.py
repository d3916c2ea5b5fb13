"""A reader through NIXL. As a process it measures the connection to a peer until it is killed.

python -m tests.support.nixl_reader PEER     the message in hexadecimal; prints "reading"
"""

import asyncio
import sys
from itertools import count

from bench.gpu_checks.ipc_exporter import build_local
from kvtransfer.nixl import NixlReader
from protos import kv_pb2
from tests.support.fake_cuda import FakeGpu
from tests.support.fake_workers import PATIENCE_S
from tests.support.pool_process import build_pool

NUM_LOCAL = 24
NUMBERS = count()


async def open_reader(
    peer: kv_pb2.Peer, timeout_s: float = PATIENCE_S, gpu: FakeGpu | None = None, is_local: bool = True
) -> NixlReader:
    local = build_local(build_pool(NUM_LOCAL, gpu), f"test {next(NUMBERS)}")
    local.is_loopback = is_local
    reader = await NixlReader.open(local, peer)
    reader._timeout_s = timeout_s  # NIXL may have to load first
    return reader


async def read_for_ever(peer: kv_pb2.Peer) -> None:
    reader = await open_reader(peer)
    print("reading", flush=True)
    while True:
        await reader.probe(peer.num_pages)


if __name__ == "__main__":
    asyncio.run(read_for_ever(kv_pb2.Peer.FromString(bytes.fromhex(sys.argv[1]))))
