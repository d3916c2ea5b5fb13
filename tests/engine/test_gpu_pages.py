"""The kernel that copies pages, in Triton's interpreter."""

import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.gpu_pages import BLOCK_WORDS, copy_pages

MAP_NORESERVE = 0x4000


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("num_words", [1, 6, 128, BLOCK_WORDS, BLOCK_WORDS + 4])
def test_pages_are_copied_where_they_belong_and_nowhere_else(num_words: int) -> None:
    generator = torch.Generator().manual_seed(num_words)
    source = torch.randint(-(1 << 31), (1 << 31) - 1, (7, num_words), dtype=torch.int32, generator=generator)
    target = torch.randint(-(1 << 31), (1 << 31) - 1, (5, num_words), dtype=torch.int32, generator=generator)
    expected = target.clone()
    expected[[3, 0, 4]] = source[[6, 1, 6]]
    copy_pages(source.data_ptr(), num_words, target, ids(6, 1, 6), ids(3, 0, 4))
    assert torch.equal(target, expected)


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
