"""Which rows of a step have which adapter, and the adapters' weights: what kernels read.

An adapter (LoRA) adds B A x to a product of x. It is in a slot, the same on all products. Rows of one slot are
together, in tiles of a few, so that its weights are read once per tile.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.staging import Ints, join_ranges

TILE_ROWS = 16  # at most: what one product of a GPU's tensor cores takes
BLOCK_COLUMNS = 64  # at most, that one part of a kernel adds to
NO_SLOT = -1


class HostTiles(NamedTuple):
    """`AdapterTiles` on the host."""

    rows: NDArray[np.int32]
    tiles: NDArray[np.int32]

    def check(self, num_rows: int, num_slots: int) -> None:
        """ValueError if a kernel would read other rows or slots than there are."""
        slots, firsts, counts = self.tiles[self.tiles[:, 0] != NO_SLOT].T
        is_good = slots.max(initial=0) < num_slots and min(part.min(initial=0) for part in (slots, firsts, counts)) >= 0
        if not is_good or counts.max(initial=0) > TILE_ROWS or (firsts + counts).max(initial=0) > len(self.rows):
            raise ValueError(f"tiles of adapters {self.tiles.tolist()}, {len(self.rows)} rows, {num_slots} slots")
        if self.rows.min(initial=0) < 0 or self.rows.max(initial=-1) >= num_rows:
            raise ValueError(f"adapters for rows {self.rows.min()} to {self.rows.max()} of {num_rows}")


class AdapterTiles(NamedTuple):
    """The rows of a product's input that have adapters, on the device."""

    rows: Tensor  # [t] int32, those of a tile one after the other
    tiles: Tensor  # [n, 3] int32: slot, first of its rows in `rows`, how many; NO_SLOT: nothing to do


class AdapterWeights(NamedTuple):
    """Weights of a product [N, K] of P parts, for each of L slots: y[n] += sum over j of b[j, n] s[p R + j], s = a x.

    p: the part that column n belongs to. An adapter of a lower rank than R fills the first ones of each R.
    """

    a: Tensor  # [L, P R, K]
    b: Tensor  # [L, R, N]
    ranks: Tensor  # [L] int32; 0: the slot's adapter does not change this product
    blocks: Tensor  # [n, 3] int32: first column, end, part; of at most BLOCK_COLUMNS


def check_product(out: Tensor, rows: Tensor, tiles: AdapterTiles, weights: AdapterWeights) -> None:
    """ValueError if a kernel would read or write beyond one of them; `HostTiles.check` sees the tiles."""
    a, b = weights.a, weights.b
    num_slots, width, depth = a.shape
    is_shaped = rows.shape == (len(out), depth) and b.shape[::2] == (num_slots, out.shape[1])
    if not is_shaped or width % b.shape[1] or not (a.dtype is b.dtype is rows.dtype):
        raise ValueError(f"adapters {tuple(a.shape)} {tuple(b.shape)} for rows {tuple(rows.shape)} {tuple(out.shape)}")
    if any(one.dtype is not torch.int32 for one in (*tiles, weights.ranks, weights.blocks)):
        raise ValueError("tiles, ranks or blocks of adapters are not int32")
    if not all(one.is_contiguous() for one in (out, rows, *tiles, *weights)):
        raise ValueError("rows, tiles or weights of adapters are not contiguous")


def sort_rows(slots: NDArray[np.int32]) -> HostTiles:
    """[T] slot of each row, or NO_SLOT |-> the tiles of those that have one."""
    order = np.argsort(slots, kind="stable")
    order = order[np.count_nonzero(slots < 0) :]
    firsts = np.flatnonzero(np.diff(slots[order], prepend=NO_SLOT))
    counts: Ints = np.diff(firsts, append=len(order))
    owners, parts = join_ranges(np.zeros(len(counts), np.int64), -(-counts // TILE_ROWS))
    begins = firsts[owners] + parts * TILE_ROWS
    sizes = np.minimum(counts[owners] - parts * TILE_ROWS, TILE_ROWS)
    return HostTiles(
        order.astype(np.int32), np.stack([slots[order[begins]], begins, sizes], 1).astype(np.int32)
    )  # fmt: skip


def divide_columns(sizes: list[int], width: int = BLOCK_COLUMNS, *, alternates: bool = False) -> NDArray[np.int32]:
    """Columns of each part |-> `AdapterWeights.blocks`. alternates: blocks of equally large parts follow in turn."""
    blocks, begin = [], 0
    if alternates:
        total = sum(sizes)
        blocks = [(at, at + width, at // width % len(sizes)) for at in range(0, total, width)]
    else:
        for part, size in enumerate(sizes):
            blocks += [(at, min(at + width, begin + size), part) for at in range(begin, begin + size, width)]
            begin += size
    return np.array(blocks, np.int32).reshape(-1, 3)
