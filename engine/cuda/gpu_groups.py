"""y = x W^T on a GPU where W is in groups of 32 along K: codes of 4 or 8 bits, and tables with a value for each group.

The layout is that of formats/groups.py. Sums are float32; their order depends on W's shape and not on the other
rows, except that one row and several rows use different kernels. Needs Triton: import it where a CUDA device is chosen.
Tile sizes are reasoned, not measured: nothing here has run on a GPU yet. Twin: FormatOps.multiply_groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.gpu_linear import MAX_ROWS as TILE_ROWS
from engine.cuda.gpu_linear import STAGES, VECTOR_ROWS, add_sums, choose_num_splits, finish

GROUP = tl.constexpr(32)
# Blocks of TILE_ROWS rows share the codes in L2, and each widens them. For more rows that costs more than to widen W
# once, which moves seven times its bytes.
MAX_ROWS = 256
# Outputs of a program's tile, and groups of each.
VECTOR_TILE = (8, 32)  # two groups of 4 bits a thread, each in one load of 16 bytes
TILE = (64, 4)  # as deep as gpu_linear's
WIDE_TILE = (16, 32)
WIDE_BYTES = 64 << 20  # 4,096 outputs of 8,192 columns, which fill a GPU from 512 rows on
WIDE_OUTPUTS = 256  # a multiple of what any tile of a product has


def multiply(
    rows: Tensor, codes: Tensor, scale: Tensor, second: Tensor | None, bits: int, has_minimums: bool,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rows @ W^T + bias, [M, N] in the rows' dtype.

    rows: [M, K] with a column stride of 1, M <= MAX_ROWS; codes to has_minimums: those of StoredGroups; bias: [N].
    ValueError for shapes that do not fit. Several rows are multiplied by values rounded to their dtype, one row by
    float32 values.
    """
    (num_rows, depth), (num_outputs, width) = rows.shape, scale.shape
    if num_rows > MAX_ROWS or rows.stride(1) != 1 or depth != find_depth(codes, scale, second, bits):
        raise ValueError(
            f"rows are {tuple(rows.shape)} with strides {rows.stride()}; expected at most {MAX_ROWS} rows of "
            f"{find_depth(codes, scale, second, bits)} and a last stride of 1"
        )
    product, num_groups = rows.new_empty(num_rows, num_outputs), depth // GROUP.value
    if num_rows <= VECTOR_ROWS:
        outputs, groups = VECTOR_TILE
        multiply_row_of_groups[triton.cdiv(num_outputs, outputs), num_rows](
            rows, codes, scale, second, bias, product, rows.stride(0), num_outputs, num_groups, width,
            bits, has_minimums, outputs, groups, STAGES,
        )  # fmt: skip
        return product
    outputs, groups = TILE
    num_splits = choose_num_splits(num_outputs, depth)
    is_split = num_splits > 1
    sums = rows.new_empty(num_splits, num_rows, num_outputs, dtype=torch.float32) if is_split else product
    num_blocks = triton.cdiv(num_rows, TILE_ROWS)
    multiply_rows_of_groups[triton.cdiv(num_outputs, outputs) * num_blocks, num_splits](
        rows, codes, scale, second, bias, sums, num_rows, rows.stride(0), num_outputs, num_groups, width, num_splits,
        num_blocks, is_split, bits, has_minimums, min(TILE_ROWS, max(16, triton.next_power_of_2(num_rows))), outputs,
        groups, STAGES,
    )  # fmt: skip
    if is_split:
        add_sums(sums, None, bias, product)
    return product


def multiply_many(
    rows: Tensor, codes: Tensor, scale: Tensor, second: Tensor | None, bits: int, has_minimums: bool,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same for any number of rows, by torch: it widens WIDE_BYTES of W at a time to the rows' dtype."""
    step = max(1, WIDE_BYTES // (rows.element_size() * rows.shape[1] * WIDE_OUTPUTS)) * WIDE_OUTPUTS
    product = rows.new_empty(len(rows), len(codes))
    for begin in range(0, len(codes), step):
        own = slice(begin, begin + step)
        weight = widen(codes[own], scale[own], None if second is None else second[own], bits, has_minimums, rows.dtype)
        if bias is None:
            torch.mm(rows, weight.T, out=product[:, own])
        else:
            torch.addmm(bias[own], rows, weight.T, out=product[:, own])
    return product


def widen(
    codes: Tensor, scale: Tensor, second: Tensor | None, bits: int, has_minimums: bool, dtype: torch.dtype
) -> Tensor:
    """W, [N, K] in `dtype`. See `multiply`."""
    (num_outputs, width), depth = scale.shape, find_depth(codes, scale, second, bits)
    wide, num_groups = codes.new_empty(num_outputs, depth, dtype=dtype), depth // GROUP.value
    outputs, groups = WIDE_TILE
    widen_groups[triton.cdiv(num_outputs, outputs), triton.cdiv(num_groups, groups)](
        codes, scale, second, wide, num_outputs, num_groups, width, bits, has_minimums, outputs, groups
    )
    return wide


def find_depth(codes: Tensor, scale: Tensor, second: Tensor | None, bits: int) -> int:
    """K. ValueError for shapes that do not fit together."""
    tables = [scale] if second is None else [scale, second]
    shape, num_groups = (len(codes), scale.shape[1]), codes.shape[1] // (4 * bits)
    fits = bits in (4, 8) and codes.shape[1] % (4 * bits) == 0 and num_groups <= shape[1]
    fits = fits and all(table.shape == shape for table in tables)
    if not (fits and all(one.is_contiguous() for one in (codes, *tables))):
        shapes = [(tuple(one.shape), one.stride()) for one in (codes, *tables)]
        raise ValueError(f"codes and tables with shapes and strides {shapes} hold no groups of {bits} bits")
    depth: int = num_groups * GROUP.value
    return depth


@triton.jit
def multiply_row_of_groups(
    x, codes, scale, second, bias, y, row_stride, num_outputs, num_groups, width,
    BITS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, m): block i of outputs for row m: scale * sum(x * code) + minimum * sum(x) of each group."""
    row = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    weights = codes + outputs.to(tl.int64)[:, None, None] * (num_groups * 4 * BITS)
    within = tl.arange(0, 4 * BITS)
    sums = tl.zeros((OUTPUTS, GROUPS), tl.float32)
    for begin in tl.range(0, num_groups, GROUPS, num_stages=STAGES):
        groups = begin + tl.arange(0, GROUPS)
        is_group = groups < num_groups
        places = groups[None, :, None] * (4 * BITS) + within[None, None, :]
        tile = tl.load(weights + places, mask=is_output[:, None, None] & is_group[None, :, None], other=0)
        factor, minimum = load_tables(scale, second, outputs, groups, is_output[:, None], width, BITS, HAS_MINIMUMS)
        values = x + row * row_stride + groups[:, None] * GROUP + within[None, :]
        lower = tl.load(values, mask=is_group[:, None], other=0.0).to(tl.float32)
        if BITS == 4:
            upper = tl.load(values + 16, mask=is_group[:, None], other=0.0).to(tl.float32)
            terms = (tile & 15).to(tl.float32) * lower[None, :, :] + (tile >> 4).to(tl.float32) * upper[None, :, :]
            totals = tl.sum(lower + upper, 1)
        else:
            terms = tile.to(tl.float32) * lower[None, :, :]
            totals = tl.sum(lower, 1)
        sums += factor * tl.sum(terms, 2) + minimum * totals[None, :]
    total = finish(tl.sum(sums, 1), None, bias, outputs, is_output)
    tl.store(y + row * num_outputs + outputs, total, mask=is_output)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_blocks"])
def multiply_rows_of_groups(
    x, codes, scale, second, bias, y, num_rows, row_stride, num_outputs, num_groups, width, num_splits, num_blocks,
    IS_SPLIT: tl.constexpr, BITS: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i num_blocks + j, s): outputs of block i, rows of block j, every num_splits-th tile of depth from s on.

    x: [M, K]; y: [M, N], or the splits' sums [num_splits, M, N] float32. See gpu_linear.multiply_rows.
    """
    split, block = tl.program_id(1), tl.program_id(0)
    rows = block % num_blocks * ROWS + tl.arange(0, ROWS)
    outputs = block // num_blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows[None, :] < num_rows, outputs[:, None] < num_outputs
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for begin in tl.range(split * GROUPS, num_groups, num_splits * GROUPS, num_stages=STAGES):
        tile, factor, minimum, columns, is_place = load_tile(
            codes, scale, second, outputs, begin, is_output, num_groups, width,
            BITS, HAS_MINIMUMS, OUTPUTS, GROUPS,
        )  # fmt: skip
        values = x + rows[None, :] * row_stride + columns[:, None]
        lower = tl.load(values, mask=is_row & is_place[:, None], other=0.0)
        if BITS == 4:
            upper = tl.load(values + 16, mask=is_row & is_place[:, None], other=0.0)
            high = (tile >> 4).to(tl.float32) * factor + minimum
            sums = tl.dot(high.to(upper.dtype), upper, sums, input_precision="ieee")
            tile = tile & 15
        low = tile.to(tl.float32) * factor + minimum
        sums = tl.dot(low.to(lower.dtype), lower, sums, input_precision="ieee")
    places = y + rows[None, :] * num_outputs + outputs[:, None]
    if IS_SPLIT:
        places += split * num_rows * num_outputs
    else:
        sums = finish(sums, None, bias, outputs[:, None], is_output)
    tl.store(places, sums, mask=is_row & is_output)


@triton.jit
def widen_groups(
    codes, scale, second, w, num_outputs, num_groups, width,
    BITS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block i of outputs, block j of groups. w: [N, K]"""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs[:, None] < num_outputs
    tile, factor, minimum, columns, is_place = load_tile(
        codes, scale, second, outputs, tl.program_id(1) * GROUPS, is_output, num_groups, width,
        BITS, HAS_MINIMUMS, OUTPUTS, GROUPS,
    )  # fmt: skip
    mask = is_output & is_place[None, :]
    places = w + outputs.to(tl.int64)[:, None] * (num_groups * GROUP) + columns[None, :]
    if BITS == 4:
        tl.store(places + 16, (tile >> 4).to(tl.float32) * factor + minimum, mask=mask)
        tile = tile & 15
    tl.store(places, tile.to(tl.float32) * factor + minimum, mask=mask)


@triton.jit
def load_tile(
    codes, scale, second, outputs, begin, is_output, num_groups, width,
    BITS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The groups from `begin` on: bytes, their scales and minimums, each [OUTPUTS, bytes]; the column of each byte's
    low code, and whether there is one, [bytes]."""
    size: tl.constexpr = 4 * BITS
    row_bytes = num_groups * size
    places = begin * size + tl.arange(0, GROUPS * size)
    is_place = places < row_bytes
    tile = tl.load(
        codes + outputs.to(tl.int64)[:, None] * row_bytes + places[None, :], mask=is_output & is_place[None, :], other=0
    )
    groups = begin + tl.arange(0, GROUPS)
    factor, minimum = load_tables(scale, second, outputs, groups, is_output, width, BITS, HAS_MINIMUMS)
    factor = tl.broadcast_to(factor[:, :, None], (OUTPUTS, GROUPS, size))
    minimum = tl.broadcast_to(minimum[:, :, None], (OUTPUTS, GROUPS, size))
    shape: tl.constexpr = (OUTPUTS, GROUPS * size)
    return tile, tl.reshape(factor, shape), tl.reshape(minimum, shape), places // size * GROUP + places % size, is_place


@triton.jit
def load_tables(
    scale, second, outputs, groups, is_output, width, BITS: tl.constexpr, HAS_MINIMUMS: tl.constexpr
):  # fmt: skip
    """Scales and minimums, [outputs, groups] float32 each. A code that stands for 0 becomes a minimum, exactly."""
    places = outputs.to(tl.int64)[:, None] * width + groups[None, :]
    mask = is_output & (groups < width)[None, :]
    factor = tl.load(scale + places, mask=mask, other=0.0).to(tl.float32)
    if second is None:
        minimum = factor * -(1 << BITS - 1)
    else:
        minimum = tl.load(second + places, mask=mask, other=0.0).to(tl.float32)
        if not HAS_MINIMUMS:
            minimum = factor * -minimum
    return factor, minimum
