"""The sum of one small tensor of each rank, in one kernel that reads the peers' memory; then, if wanted, add and norm.

Each rank has a buffer that all ranks map. A program per row copies its row there, sets a flag in every rank's buffer,
waits for all flags in its own, and adds the rows of all ranks in the order of ranks: all get the same bits. A flag is
the number of the row's launches so far, its epoch. A row has two places and uses them in turn: a rank that writes a
place again has seen that all peers are one epoch further, so they have read what was there. Twin: `Ranks.add_norm_`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that wait for those of other GPUs. About one for each multiprocessor, so that all run at once; and GPUs start
# programs in the order of their numbers, so the first that waits runs on all ranks.
MAX_ROWS = 128
MAX_ROW_BYTES = 32 << 10
PATIENCE = 1 << 28  # polls: minutes, as other ranks may be compiling


class SharedRows(NamedTuple):
    """This rank's view of all ranks' buffers."""

    buffer: Tensor  # [buffer_bytes(size)] uint8, of this rank; flags are 0 at first
    offsets: Tensor  # [size] int64: where each rank's buffer begins, in bytes from this one's
    epochs: Tensor  # [MAX_ROWS] int32, 0 at first; of this rank alone
    rank: int
    size: int  # a power of two


def buffer_bytes(size: int) -> int:
    return flag_bytes(size) + 2 * MAX_ROWS * MAX_ROW_BYTES


def flag_bytes(size: int) -> int:
    """At the buffer's beginning: [MAX_ROWS, size] int32."""
    return 4 * MAX_ROWS * size


@triton.jit(debug=True)  # for device_assert; epochs may overflow
def sum_kernel(
    part, hidden, weight, out, buffer, offsets, epochs, width, eps, rank,
    HAS_NORM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
    PATIENCE: tl.constexpr,
):  # fmt: skip
    """part, hidden, out: [T, width], contiguous. out: the parts' sum; or with a norm, hidden += sum, out: its norm."""
    row = tl.program_id(0)
    epoch = tl.load(epochs + row) + 1
    place = 4 * ROWS * SIZE + ((epoch & 1) * ROWS + row) * ROW_BYTES
    column = tl.arange(0, BLOCK)
    mask = column < width
    begin = row.to(tl.int64) * width
    own = (buffer + place).to(tl.pointer_type(part.dtype.element_ty))
    tl.store(own + column, tl.load(part + begin + column, mask=mask, other=0.0), mask=mask)
    tl.debug_barrier()  # all threads have written before one of them says so

    peers = tl.arange(0, SIZE)
    theirs = (buffer + tl.load(offsets + peers)).to(tl.pointer_type(tl.int32)) + row * SIZE + rank
    tl.atomic_xchg(theirs, tl.zeros([SIZE], tl.int32) + epoch, sem="release", scope="sys")
    flags = buffer.to(tl.pointer_type(tl.int32)) + row * SIZE + peers
    behind = 1
    polls = 0
    while (behind > 0) & (polls < PATIENCE):
        found = tl.atomic_add(flags, tl.zeros([SIZE], tl.int32), sem="acquire", scope="sys")
        behind = tl.max(epoch - found, axis=0)  # a difference, as epochs wrap around
        polls += 1
    tl.device_assert(behind <= 0, "a rank did not come to a sum of all ranks")
    tl.debug_barrier()

    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        distance = tl.multiple_of(tl.load(offsets + peer), 16)
        given = (buffer + distance + place).to(tl.pointer_type(part.dtype.element_ty))
        total += tl.load(given + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        total += tl.load(hidden + begin + column, mask=mask, other=0.0)
        tl.store(hidden + begin + column, total, mask=mask)
        scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / width + eps)
        total = total * scale * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + begin + column, total.to(out.dtype.element_ty), mask=mask)
    tl.store(epochs + row, epoch)


def fits(part: Tensor) -> bool:
    """Whether the kernel can add such parts. Ranks agree, as their parts have the same shape."""
    if part.ndim != 2 or not part.is_contiguous() or part.dtype.itemsize == 8:
        return False
    return 0 < len(part) <= MAX_ROWS and part.shape[1] * part.dtype.itemsize <= MAX_ROW_BYTES


def all_reduce_(part: Tensor, shared: SharedRows) -> Tensor:
    """Replace `part`, [T, H], by the sum over all ranks, rounded once, and return it. `part` must fit."""
    _launch(part, part, part, part, 0.0, shared, has_norm=False)
    return part


def add_norm_(hidden: Tensor, part: Tensor, weight: Tensor, eps: float, shared: SharedRows) -> Tensor:
    """Add all ranks' parts to `hidden` in place, [T, H] float32; returns the norm of the sum in the parts' dtype."""
    if hidden.dtype is not torch.float32 or not hidden.is_contiguous() or hidden.shape != part.shape:
        raise ValueError(
            f"sums are {hidden.dtype} {tuple(hidden.shape)} with strides {hidden.stride()}, "
            f"expected contiguous float32 {tuple(part.shape)}"
        )
    out = torch.empty_like(part)
    _launch(part, hidden, weight, out, eps, shared, has_norm=True)
    return out


def _launch(
    part: Tensor, hidden: Tensor, weight: Tensor, out: Tensor, eps: float, shared: SharedRows, has_norm: bool
) -> None:
    num_rows, width = part.shape
    block = triton.next_power_of_2(width)
    sum_kernel[(num_rows,)](
        part, hidden, weight, out, shared.buffer, shared.offsets, shared.epochs, width, eps, shared.rank,
        HAS_NORM=has_norm, SIZE=shared.size, BLOCK=block, ROWS=MAX_ROWS, ROW_BYTES=MAX_ROW_BYTES, PATIENCE=PATIENCE,
        num_warps=min(16, max(4, block // 512)), sanitize_overflow=False,
    )  # fmt: skip
