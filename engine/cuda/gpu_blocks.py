"""y = x W^T on a GPU where W is e4m3 with a scale for each output and 128 columns; x is plain, or e4m3 with scales too.

Few plain rows are bound by reading W once; many rounded rows, by arithmetic in 8 bits. The sums of 128 columns are
scaled and added in float32, in an order that depends on W's shape and not on the other rows. Needs Triton: import it
where a CUDA device is chosen. Tile sizes are reasoned, not measured: nothing here has run on a GPU yet.
Twin: FormatOps.multiply_fp8.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.gpu_linear import MAX_ROWS, STAGES, TILE, add_sums, choose_num_splits, finish

BLOCK = TILE[1]  # columns that share a scale: a tile's depth
MANY_TILE = (128, 128)  # outputs and rows: 64 sums a thread
MANY_STAGES = 3  # tiles of 32 KiB: two programs on a multiprocessor
MANY_WARPS = 8


def multiply(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows @ W^T + bias, [M, N] in the rows' dtype.

    rows: [M, K] with a column stride of 1, M <= MAX_ROWS; weight: [N, K] e4m3; scale: [N, ceil(K / 128)] float32;
    bias: [N]. ValueError for shapes that do not fit.
    """
    if len(rows) > MAX_ROWS:
        raise ValueError(f"{len(rows)} rows, expected at most {MAX_ROWS}")
    num_splits = choose_num_splits(*weight.shape)
    product = rows.new_empty(len(rows), len(weight))
    sums = product
    if num_splits > 1:
        sums = rows.new_empty(num_splits, *product.shape, dtype=torch.float32)
    tile = (TILE[0], max(16, triton.next_power_of_2(len(rows))))
    _launch(rows, None, weight, scale, bias, sums, num_splits, tile, STAGES, 4)
    if num_splits > 1:
        add_sums(sums, None, bias, product)
    return product


def multiply_rounded(
    rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(rows * row_scale) @ W^T + bias, [M, N] in `dtype`. rows: [M, K] e4m3; row_scale: [M, ceil(K / 128)] float32."""
    product = torch.empty(len(rows), len(weight), dtype=dtype, device=rows.device)
    _launch(rows, row_scale, weight, scale, bias, product, 1, MANY_TILE, MANY_STAGES, MANY_WARPS)
    return product


def _launch(
    rows: Tensor, row_scale: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, sums: Tensor,
    num_splits: int, tile: tuple[int, int], stages: int, warps: int,
) -> None:  # fmt: skip
    (num_outputs, depth), num_blocks = weight.shape, triton.cdiv(weight.shape[1], BLOCK)
    fits = rows.shape[1] == depth and rows.stride(1) == 1 and scale.shape == (num_outputs, num_blocks)
    fits = fits and (row_scale is None or (row_scale.shape == (len(rows), num_blocks) and row_scale.is_contiguous()))
    if not (fits and weight.is_contiguous() and scale.is_contiguous()):
        found = [(tuple(one.shape), one.stride()) for one in (rows, row_scale, weight, scale) if one is not None]
        raise ValueError(f"rows, weights and scales of blocks with shapes and strides {found} do not fit together")
    outputs, num_rows = tile
    multiply_blocks[triton.cdiv(num_outputs, outputs), triton.cdiv(len(rows), num_rows), num_splits](
        rows, row_scale, weight, scale, bias, sums, len(rows), rows.stride(0), num_outputs, depth, num_splits,
        num_splits > 1, num_rows, outputs, BLOCK, stages, num_warps=warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def multiply_blocks(
    x, x_scale, w, w_scale, bias, y, num_rows, row_stride, num_outputs, depth, num_splits,
    IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, j, s): blocks i of outputs and j of rows, over every num_splits-th tile of depth from s on.

    x: [M, K]; y: [M, N], or the splits' sums [num_splits, M, N] float32. See gpu_linear.multiply_rows.
    """
    split, num_blocks = tl.program_id(2), tl.cdiv(depth, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    inputs = x + rows.to(tl.int64)[None, :] * row_stride
    weights = w + outputs.to(tl.int64)[:, None] * depth
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for block in tl.range(split, num_blocks, num_splits, num_stages=STAGES):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < depth
        values = tl.load(inputs + columns[:, None], mask=is_row[None, :] & is_column[:, None], other=0.0)
        tile = tl.load(weights + columns[None, :], mask=is_output[:, None] & is_column[None, :], other=0.0)
        factor = tl.load(w_scale + outputs * num_blocks + block, mask=is_output, other=0.0)[:, None]
        if x_scale is None:
            tile = tile.to(tl.float32).to(values.dtype)
        else:
            factor = factor * tl.load(x_scale + rows * num_blocks + block, mask=is_row, other=0.0)[None, :]
        sums += tl.dot(tile, values, input_precision="ieee") * factor
    places = y + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    if IS_SPLIT:
        places += split * num_rows * num_outputs
    else:
        sums = finish(sums, None, bias, outputs[:, None], is_output[:, None])
    tl.store(places, sums, mask=is_row[None, :] & is_output[:, None])
