"""The process of bench/gpu_checks/ipc_exporter.py with small pages, so that tests can read another process's memory.

python -m tests.pool_process [fake-gpu] [nixl] NUM_PAGES
"""

import sys

import torch

from bench.gpu_checks.ipc_exporter import obey
from engine.kvcache.gpu import Gpu
from engine.kvcache.pool import Pool, PoolShape
from kvtransfer.nixl_pool import NixlPool
from tests.fake_cuda import FakeGpu


def build_pool(num_pages: int, gpu: Gpu | None = None) -> Pool:
    """A pool of small pages: 2 layers x 2 x 1 head x 4 tokens x 8 float32 = 512 bytes."""
    return Pool(PoolShape(num_pages, 2, 1, 4, 8, torch.float32), torch.device("cpu"), gpu=gpu)


if __name__ == "__main__":
    pool = build_pool(int(sys.argv[-1]), FakeGpu() if "fake-gpu" in sys.argv else None)
    obey(pool, NixlPool("exporter", pool, is_local=True) if "nixl" in sys.argv else None)
