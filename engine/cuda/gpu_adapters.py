"""Adds adapters' part to products on a GPU: a tile of rows with one adapter per program, for any number of adapters.

Sums are float32, in an order that depends on the product's shape alone. Tiles without an adapter do nothing, so that a
captured step can have fewer than it was captured with. Twin: `AdapterOps.add_adapters_`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.adapters.rows import BLOCK_COLUMNS, TILE_ROWS, AdapterTiles, AdapterWeights, check_product

DEPTH = 128  # of a program's tile of x and A: rows of 256 bytes
RANKS = 16  # rows of A per program: what a tensor core takes
SPLIT_DEPTH = 1024  # of x that one program reads: a deep product is divided, since a step has few tiles
STAGES = 3


def add_adapters_(out: Tensor, rows: Tensor, tiles: AdapterTiles, weights: AdapterWeights) -> None:
    """See `AdapterOps.add_adapters_`. ValueError for shapes that do not fit. Only launches."""
    check_product(out, rows, tiles, weights)
    a, b, ranks, blocks = weights
    (_, width, depth), max_rank = a.shape, b.shape[1]
    num_splits, num_tiles = triton.cdiv(depth, SPLIT_DEPTH), len(tiles.tiles)
    shrunk = torch.empty(num_splits, len(tiles.rows), width, dtype=torch.float32, device=out.device)
    shrink_kernel[num_tiles, triton.cdiv(width, RANKS), num_splits](
        rows, a, ranks, *tiles, shrunk, len(tiles.rows), depth, width, TILE_ROWS, RANKS, DEPTH, SPLIT_DEPTH, STAGES
    )
    expand_kernel[num_tiles, len(blocks)](
        out, b, ranks, *tiles, blocks, shrunk, len(tiles.rows), out.shape[1], width, max_rank, num_splits,
        TILE_ROWS, triton.next_power_of_2(max(max_rank, RANKS)), BLOCK_COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x, a, ranks, rows, tiles, shrunk, num_rows, depth, width,
    ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, j, s): tile i, RANKS rows of A from j on, part s of the depth. x: [T, K], a: [L, width, K],
    shrunk: [S, t, width]."""
    tile = tiles + tl.program_id(0) * 3
    slot, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if (slot >= 0) & (tl.load(ranks + tl.maximum(slot, 0)) > 0):
        row = tl.arange(0, ROWS)
        rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        is_row, is_rank = row < count, rank < width
        own = tl.load(rows + first + row, mask=is_row, other=0).to(tl.int64)
        weights = a + (slot.to(tl.int64) * width + rank) * depth
        begin = tl.program_id(2) * SPLIT
        sums = tl.zeros((ROWS, RANKS), tl.float32)
        for at in tl.range(begin, min(begin + SPLIT, depth), DEPTH, num_stages=STAGES):
            column = at + tl.arange(0, DEPTH)
            is_column = column < depth
            value = tl.load(x + own[:, None] * depth + column[None, :], mask=is_row[:, None] & is_column, other=0.0)
            part = tl.load(weights[None, :] + column[:, None], mask=is_rank & is_column[:, None], other=0.0)
            sums = tl.dot(value, part, sums, input_precision="ieee")
        to = shrunk + (tl.program_id(2) * num_rows + first + row[:, None]) * width + rank[None, :]
        tl.store(to, sums, mask=is_row[:, None] & is_rank)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def expand_kernel(
    out, b, ranks, rows, tiles, blocks, shrunk, num_rows, num_columns, width, max_rank, num_splits,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (i, c): tile i, block c of columns. out: [T, N], b: [L, max_rank, N], shrunk: [S, t, width]."""
    tile, block = tiles + tl.program_id(0) * 3, blocks + tl.program_id(1) * 3
    slot, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if (slot >= 0) & (tl.load(ranks + tl.maximum(slot, 0)) > 0):
        row, rank = tl.arange(0, ROWS), tl.arange(0, RANKS)
        column = tl.load(block) + tl.arange(0, COLUMNS)
        is_row, is_rank, is_column = row < count, rank < max_rank, column < tl.load(block + 1)
        own = tl.load(rows + first + row, mask=is_row, other=0).to(tl.int64)
        of_part = shrunk + (first + row[:, None]) * width + tl.load(block + 2) * max_rank + rank[None, :]
        is_value = is_row[:, None] & is_rank
        value = tl.zeros((ROWS, RANKS), tl.float32)
        for split in range(num_splits):
            value += tl.load(of_part + split * num_rows * width, mask=is_value, other=0.0)
        weights = b + (slot.to(tl.int64) * max_rank + rank[:, None]) * num_columns + column[None, :]
        part = tl.load(weights, mask=is_rank[:, None] & is_column, other=0.0).to(tl.float32)
        added = tl.dot(value, part, input_precision="ieee")
        place, mask = out + own[:, None] * num_columns + column[None, :], is_row[:, None] & is_column
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32) + added
        tl.store(place, total.to(out.dtype.element_ty), mask=mask)
