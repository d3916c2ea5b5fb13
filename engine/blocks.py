"""Rows over a vocabulary cut into blocks with known maxima, so that few values of a large one are looked at twice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_TOKENS, MIN_BLOCKS = 64, 64
CACHE_VALUES = 1 << 16  # 256 KiB of float32: several steps on them stay in a core's cache


@dataclass(frozen=True, slots=True)
class Blocks:
    """R rows: token t is in block t // W, column t % W. Padded with -inf. Changed by nobody."""

    values: Tensor  # [R, N, W] float32
    maxima: Tensor  # [R, N] each block's largest


def build_blocks(rows: Tensor) -> Blocks:
    """[R, V] float32 -> its blocks, of one token each in a small vocabulary. Copies only to pad."""
    width = BLOCK_TOKENS if rows.shape[1] >= BLOCK_TOKENS * MIN_BLOCKS else 1
    padding = -rows.shape[1] % width
    padded = functional.pad(rows, (0, padding), value=-torch.inf) if padding else rows
    values = padded.reshape(rows.shape[0], -1, width)
    return Blocks(values, values.amax(-1))


def join_blocks(parts: Sequence[Blocks]) -> Blocks:
    """The rows of all parts, in order."""
    return Blocks(torch.cat([part.values for part in parts]), torch.cat([part.maxima for part in parts]))


def find_likeliest(blocks: Blocks) -> Tensor:
    """[R] int64, the first of each row's largest values."""
    block = blocks.maxima.max(1).indices
    rows = torch.arange(len(block), device=block.device)
    return block * blocks.values.shape[2] + blocks.values[rows, block].max(1).indices


def find_largest(blocks: Blocks, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row, descending, and their ids: [R, count] each. Which of equals is open.

    They lie in the `count` blocks with the largest maxima.
    """
    width = blocks.values.shape[2]
    if count > blocks.maxima.shape[1]:
        values, ids = blocks.values.flatten(1).topk(count)
        return values, ids
    tops = blocks.maxima.topk(count).indices  # [R, count] blocks
    rows = torch.arange(len(tops), device=tops.device)
    values, places = blocks.values[rows[:, None], tops].flatten(1).topk(count)
    return values, tops.gather(1, places // width) * width + places % width


def split_for_cache(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Tensors of as many rows each -> views of some rows of all, in order, sized by the first; all at once on a GPU.

    A chain of cheap operations on a CPU runs at the speed of what its results are kept in.
    """
    rows, first = len(tensors[0]), tensors[0]
    step = max(1, CACHE_VALUES * rows // max(1, first.numel()) if first.device.type == "cpu" else rows)
    return list(zip(*(torch.split(tensor, step) for tensor in tensors), strict=True))
