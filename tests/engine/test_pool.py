"""The pool's memory: the order of KV in it, and pages copied in and out as bytes."""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kv.pool import Pool, PoolShape
from tests.support.fake_cuda import FakeGpu
from wire.kv_layout import KV_HEADS, PAGES, KvPart

CPU = torch.device("cpu")
SHAPE = PoolShape(5, (KvPart(3, 4, 16),), 8, torch.bfloat16)
DRAFT_SHAPE = PoolShape(1, (KvPart(2, 2, 16),), 8, torch.bfloat16)


def address(part: Tensor) -> tuple[int, int]:
    """Addresses of its first byte and the one after its last."""
    return part.data_ptr(), part.data_ptr() + part.nbytes


def test_any_range_of_heads_of_a_page_is_one_run() -> None:
    pool = Pool(SHAPE, CPU, DRAFT_SHAPE)
    assert pool.draft_tensor is not None
    for tensor in (pool.tensor, pool.draft_tensor):
        for page in tensor.unbind(PAGES):
            heads = page.unbind(KV_HEADS - 1)
            for first in range(len(heads)):
                for end in range(first + 1, len(heads) + 1):
                    run = page.narrow(KV_HEADS - 1, first, end - first)
                    assert run.is_contiguous()
                    assert address(run) == (address(heads[first])[0], address(heads[end - 1])[1])


@pytest.mark.parametrize("memory", ["shared", "private", "gpu"])
def test_stored_pages_are_loaded_as_they_were(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if memory == "private":
        monkeypatch.delattr(os, "memfd_create")
    pool = Pool(SHAPE, CPU, DRAFT_SHAPE, FakeGpu() if memory == "gpu" else None)
    assert (pool.fd is not None) == (memory != "private")
    rows = np.random.default_rng(1).integers(0, 256, (3, pool.page_bytes), np.uint8)
    pool.store([4, 0, 2], list(rows))
    pool.store([], [])
    assert np.array_equal(pool.load([0, 1, 2, 3, 4]), [rows[1], 0 * rows[0], rows[2], 0 * rows[0], rows[0]])
