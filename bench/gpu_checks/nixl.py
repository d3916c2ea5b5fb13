"""Pages of one process read by another through NIXL, in the memory of a GPU or a CPU.

    python -m bench.gpu_checks.nixl DEVICE

Runs in its own process, since UCX may crash it. Has not run on a card.
"""

import asyncio
import sys

import torch

from bench.gpu_checks.ipc import Exporter, check_reader, run_apart, time_reads
from bench.gpu_checks.ipc_exporter import SHAPE_8B
from engine.kv.pool import Pool
from kvtransfer.nixl import NixlReader
from kvtransfer.nixl_agent import NOT_INSTALLED, is_installed
from runtime.rpc import open_channel

NUM_PAGES = {"cuda": 128, "cpu": 8}  # of 2 MiB: a prompt of 2,048 tokens; few on a CPU, where speed does not matter
READ_S = 30.0


def check_nixl(device: torch.device) -> str:
    """Pages through NIXL arrive as they are there, and a recycled one is refused: by what UCX uses, and how fast."""
    if not is_installed():
        return f"skipped: {NOT_INSTALLED}"
    return run_apart("bench.gpu_checks.nixl", device.type)


async def read_pages(device: torch.device) -> str:
    pool = Pool(SHAPE_8B.with_pages(NUM_PAGES[device.type]), device)
    exporter_command = (sys.executable, "-m", "bench.gpu_checks.ipc_exporter", f"nixl-{device.type}")
    with Exporter(exporter_command, pool.num_pages) as exporter:
        peer = exporter.peer
        reader = await NixlReader.open(peer, "reader", True, pool, open_channel(peer.address), READ_S)
        seconds = await time_reads(reader, pool.num_pages)
        found = await check_reader(reader, exporter, pool)
        rate = pool.num_pages * pool.page_bytes / seconds / 1e9
        await reader.close()
    return f"{reader.transport}: {found}; {seconds * 1e3:.1f} ms, {rate:.1f} GB/s"


if __name__ == "__main__":
    print(asyncio.run(read_pages(torch.device(sys.argv[1]))))
