"""y = x W^T for up to MAX_ROWS rows on a GPU, bound by reading W once. W is fp8 with a scale per output, or plain.

Sums are float32; their order depends on W's shape and not on the other rows, except that one row and several rows use
different kernels. Needs Triton: import it where a CUDA device is chosen. Tile sizes are reasoned, not measured:
nothing here has run on a GPU yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 64  # their tile of x and their sums fit into a multiprocessor; more rows would be bound by arithmetic
VECTOR_ROWS = 1  # up to this many rows use ordinary cores, one by one; more use tensor cores, together

# Outputs and depth of a program's tile.
VECTOR_TILE = (8, 512)  # 32 weights a thread in two 16-byte loads; 4,096 outputs make 512 programs
TILE = (64, 128)  # 64 outputs fill a Hopper tensor core's operand; 128 bytes of fp8 are a cache line of L2
STAGES = 4  # tiles in flight: 2 programs x 3 x 8 KiB a multiprocessor, where 26 KiB hide 0.8 us at 4.3 TB/s
WANTED_PROGRAMS = 256  # about two for each of the 132 multiprocessors of an H100 or H200
MIN_SPLIT_TILES = 4  # depth tiles per program; with fewer the pipeline never fills
SUM_TILE = 256  # outputs


def multiply(rows: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """rows @ (weight * scale)^T + bias.

    rows: [M, K] with a column stride of 1, M <= MAX_ROWS; weight: [N, K] contiguous, e4m3 or of the rows' dtype;
    scale: [N] float32; bias: [N] |-> [M, N] in the rows' dtype. ValueError for shapes that do not fit.
    """
    (num_rows, depth), (num_outputs, expected) = rows.shape, weight.shape
    if num_rows > MAX_ROWS or depth != expected or rows.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"rows are {tuple(rows.shape)} with strides {rows.stride()}, weights {tuple(weight.shape)} with strides "
            f"{weight.stride()}; expected at most {MAX_ROWS} rows of {expected} and last strides of 1"
        )
    product = torch.empty(num_rows, num_outputs, dtype=rows.dtype, device=rows.device)
    if num_rows <= VECTOR_ROWS:
        outputs, columns = VECTOR_TILE
        multiply_row[triton.cdiv(num_outputs, outputs), num_rows](
            rows, weight, scale, bias, product, rows.stride(0), num_outputs, depth, outputs, columns, STAGES
        )
    else:
        _multiply_together(rows, weight, scale, bias, product)
    return product


def _multiply_together(
    rows: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, product: Tensor
) -> None:
    (num_rows, depth), num_outputs = rows.shape, weight.shape[0]
    outputs, columns = TILE
    num_splits = choose_num_splits(num_outputs, depth)
    sums = product
    if num_splits > 1:
        sums = torch.empty(num_splits, num_rows, num_outputs, dtype=torch.float32, device=rows.device)
    multiply_rows[triton.cdiv(num_outputs, outputs), num_splits](
        rows, weight, scale, bias, sums, num_rows, rows.stride(0), num_outputs, depth, num_splits,
        num_splits > 1, max(16, triton.next_power_of_2(num_rows)), outputs, columns, STAGES,
    )  # fmt: skip
    if num_splits > 1:
        add_sums(sums, scale, bias, product)


def add_sums(sums: Tensor, scale: Tensor | None, bias: Tensor | None, product: Tensor) -> None:
    """The sum of the splits' sums, [num_splits, M, N] float32, into product: [M, N]."""
    num_splits, num_rows, num_outputs = sums.shape
    add_splits[triton.cdiv(num_outputs, SUM_TILE), num_rows](
        sums, scale, bias, product, num_rows, num_outputs, num_splits, SUM_TILE
    )


def choose_num_splits(num_outputs: int, depth: int) -> int:
    """Programs that share the depth of an output: enough for two programs per multiprocessor."""
    blocks, depth_tiles = -(-num_outputs // TILE[0]), -(-depth // TILE[1])
    return max(1, min(-(-WANTED_PROGRAMS // blocks), depth_tiles // MIN_SPLIT_TILES))


@triton.jit
def multiply_row(
    x, w, scale, bias, y, row_stride, num_outputs, depth,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, m): block i of outputs for row m. x: [M, K], w: [N, K], y: [M, N]."""
    row = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    weights = w + outputs.to(tl.int64)[:, None] * depth
    sums = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    for begin in tl.range(0, depth, COLUMNS, num_stages=STAGES):
        columns = begin + tl.arange(0, COLUMNS)
        is_column = columns < depth
        values = tl.load(x + row * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)
        tile = tl.load(weights + columns[None, :], mask=is_output[:, None] & is_column[None, :], other=0.0)
        sums += tile.to(tl.float32) * values[None, :]
    total = finish(tl.sum(sums, 1), scale, bias, outputs, is_output)
    tl.store(y + row * num_outputs + outputs, total, mask=is_output)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def multiply_rows(
    x, w, scale, bias, y, num_rows, row_stride, num_outputs, depth, num_splits,
    IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, s): block i of outputs for all rows, over every num_splits-th tile of depth from s on.

    x: [M, K], w: [N, K]; y: [M, N], or the splits' sums [num_splits, M, N] float32. The weights are the left operand:
    a tensor core takes it from registers, where the weights are widened.
    """
    split = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows[None, :] < num_rows, outputs[:, None] < num_outputs
    weights = w + outputs.to(tl.int64)[:, None] * depth
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for begin in tl.range(split * COLUMNS, depth, num_splits * COLUMNS, num_stages=STAGES):
        columns = begin + tl.arange(0, COLUMNS)
        is_column = columns < depth
        values = tl.load(x + rows[None, :] * row_stride + columns[:, None], mask=is_row & is_column[:, None], other=0.0)
        tile = tl.load(weights + columns[None, :], mask=is_output & is_column[None, :], other=0.0)
        if scale is not None:
            tile = tile.to(tl.float32)  # Triton 3.6 converts e4m3 to bfloat16 only from compute capability 9.0 on
        sums = tl.dot(tile.to(values.dtype), values, sums, input_precision="ieee")
    places = y + rows[None, :] * num_outputs + outputs[:, None]
    if IS_SPLIT:
        places += split * num_rows * num_outputs
    else:
        sums = finish(sums, scale, bias, outputs[:, None], is_output)
    tl.store(places, sums, mask=is_row & is_output)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def add_splits(sums, scale, bias, y, num_rows, num_outputs, num_splits, OUTPUTS: tl.constexpr):
    """Program (i, m): block i of outputs for row m. sums: [num_splits, M, N], y: [M, N]."""
    row = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    total = tl.zeros((OUTPUTS,), tl.float32)
    for split in range(num_splits):
        total += tl.load(sums + (split * num_rows + row) * num_outputs + outputs, mask=is_output, other=0.0)
    total = finish(total, scale, bias, outputs, is_output)
    tl.store(y + row * num_outputs + outputs, total, mask=is_output)


@triton.jit
def finish(sums, scale, bias, outputs, is_output):
    """Apply the outputs' scales and biases, if any, to their sums."""
    if scale is not None:
        sums *= tl.load(scale + outputs, mask=is_output, other=0.0)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    return sums
