"""The kernel that copies pages, in Triton's interpreter."""

import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.gpu_pages import copy_pages

MAP_NORESERVE = 0x4000


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_pools_may_be_larger_than_32_bits_count() -> None:
    num_words, far = 1 << 17, 20_000  # the far page begins at word 2.6e9, byte 1e10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 12 << 30, flags=flags)
    pool = torch.from_numpy(np.frombuffer(memory, np.int32)).view(-1, num_words)
    pool[far] = torch.arange(num_words, dtype=torch.int32)
    copy_pages(pool.data_ptr(), num_words, pool, ids(far), ids(2))
    copy_pages(pool.data_ptr(), num_words, pool, ids(2), ids(far + 1))
    assert torch.equal(pool[2], pool[far]) and torch.equal(pool[far + 1], pool[far])


def test_pages_that_are_not_aligned_or_have_no_place_are_refused() -> None:
    pool = torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 pages cannot be copied into 1"):
        copy_pages(pool.data_ptr(), 8, pool, ids(0, 1), ids(1))
    with pytest.raises(ValueError, match="are not aligned to 16 bytes"):
        copy_pages(pool.data_ptr() + 4, 8, pool, ids(0), ids(1))
