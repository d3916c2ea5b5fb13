"""A mixture of experts for up to MAX_ROWS rows on a GPU, bound by reading the weights of the chosen experts once.

A slot is one row's use of one expert: slot t k + s is the s-th expert of row t. Sums are float32; their order depends
on the weights' shape alone. Needs Triton: import it where a CUDA device is chosen. Tile sizes are reasoned, not
measured: nothing here has run on a card yet. Twins: engine/ops/base.py, engine/experts/moe.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16  # of 8 slots each on 128 experts: 81 are hit on average, so weights are read 1.6 times, mostly from L2
# Outputs and depth of a program's tile: 32 weights a thread, in four 16-byte loads.
GATED_TILE = (4, 512)  # of both gate and up; 8 slots of 768 outputs make 1,536 programs
TILE = (8, 512)
STAGES = 4  # tiles in flight
SUM_TILE = 256  # outputs

KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)
LIMIT = tl.constexpr(7.0)
SLOPE = tl.constexpr(1.702)
GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): (1 + tanh(x)) / 2 is sigmoid(2 x)
GELU_CUBE = tl.constexpr(0.044715)


def mix(
    rows: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The weighted sum of each row's experts, in the rows' dtype.

    rows: [T, H] with a column stride of 1, T <= MAX_ROWS; ids: [T, k] int64; weights: [T, k] float32; gate_up:
    [E, 2 I, H]; down: [E, H, I]; biases: [E, 2 I], [E, H]; all but rows contiguous. ValueError for shapes that do not
    fit. The caller checks ids.
    """
    (num_rows, depth), num_experts, width = rows.shape, len(down), down.shape[2]
    parts = [ids, weights, gate_up, down, *(bias for bias in (gate_up_bias, down_bias) if bias is not None)]
    if num_rows > MAX_ROWS or rows.stride(1) != 1 or not all(part.is_contiguous() for part in parts):
        raise ValueError(
            f"rows are {tuple(rows.shape)} with strides {rows.stride()}, expected at most {MAX_ROWS} with a last "
            f"stride of 1; the others have strides {[part.stride() for part in parts]}, expected contiguous ones"
        )
    if (gate_up.shape, down.shape) != ((num_experts, 2 * width, depth), (num_experts, depth, width)):
        raise ValueError(f"weights are {tuple(gate_up.shape)} and {tuple(down.shape)} for rows of {depth}")
    num_slots, top_k = ids.numel(), ids.shape[1]
    gated = rows.new_empty(num_slots, width)
    outputs, columns = GATED_TILE
    multiply_slots[num_slots, triton.cdiv(width, outputs)](
        rows, ids, gate_up, gate_up_bias, gated, rows.stride(0), top_k, width, depth,
        activation, outputs, columns, STAGES,
    )  # fmt: skip
    products = torch.empty(num_slots, depth, dtype=torch.float32, device=rows.device)
    outputs, columns = TILE
    multiply_slots[num_slots, triton.cdiv(depth, outputs)](
        gated, ids, down, down_bias, products, width, 1, depth, width, None, outputs, columns, STAGES
    )
    return add_slots(products, weights, None, rows.dtype)


def add_slots(outputs: Tensor, weights: Tensor, places: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Row t's sum over s of weights[t, s] * outputs[places[t k + s]], in float32.

    outputs: [T k, H], weights: [T, k] float32, both contiguous; places: [T k] int64, None for 0, 1, 2, ...
    |-> [T, H] in `dtype`
    """
    (num_rows, top_k), width = weights.shape, outputs.shape[1]
    total = torch.empty(num_rows, width, dtype=dtype, device=outputs.device)
    add_slots_kernel[num_rows, triton.cdiv(width, SUM_TILE)](outputs, weights, places, total, top_k, width, SUM_TILE)
    return total


@triton.jit
def multiply_slots(
    x, ids, w, bias, y, row_stride, slots_per_row, num_outputs, depth,
    ACTIVATION: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (s, i): block i of outputs of slot s. Programs of one block run together and share weights in L2.

    x: [slots / slots_per_row, K], ids: [slots]; w: [E, N, K], bias: [E, N]; y: [slots, N]. With an activation: w is
    [E, 2 N, K] and bias [E, 2 N], gates before ups, and y holds their activation.
    """
    slot = tl.program_id(0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    first = tl.load(ids + slot) * num_outputs  # int64: the expert's first output in w
    if ACTIVATION is not None:
        first *= 2
    weights, up_weights = w + (first + outputs)[:, None] * depth, w + (first + num_outputs + outputs)[:, None] * depth
    sums = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    ups = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    for begin in tl.range(0, depth, COLUMNS, num_stages=STAGES):
        columns = begin + tl.arange(0, COLUMNS)
        is_column = columns < depth
        is_inside = is_output[:, None] & is_column[None, :]
        values = tl.load(x + slot // slots_per_row * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)
        sums += tl.load(weights + columns[None, :], mask=is_inside, other=0.0).to(tl.float32) * values[None, :]
        if ACTIVATION is not None:
            ups += tl.load(up_weights + columns[None, :], mask=is_inside, other=0.0).to(tl.float32) * values[None, :]
    total = tl.sum(sums, 1)
    if bias is not None:
        total += tl.load(bias + first + outputs, mask=is_output, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.sum(ups, 1)
        if bias is not None:
            up += tl.load(bias + first + num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)
        total = activate(total, up, ACTIVATION)
    tl.store(y + slot.to(tl.int64) * num_outputs + outputs, total.to(y.dtype.element_ty), mask=is_output)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """All activations are gate * sigmoid(slope) * up."""
    slope = gate
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, LIMIT, KEEP_NAN)
        up = tl.minimum(tl.maximum(up, -LIMIT, KEEP_NAN), LIMIT, KEEP_NAN) + 1.0
        slope = gate * SLOPE
    elif ACTIVATION == "gelu_tanh":
        slope = GELU_SLOPE * (gate + GELU_CUBE * gate * gate * gate)
    else:
        tl.static_assert(ACTIVATION == "silu")
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def add_slots_kernel(outputs, weights, places, total, top_k, width, BLOCK: tl.constexpr):
    """Program (t, j): block j of row t. See `add_slots`."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    sums = tl.zeros((BLOCK,), tl.float32)
    for index in range(top_k):
        slot = row.to(tl.int64) * top_k + index
        place = slot
        if places is not None:
            place = tl.load(places + slot)
        values = tl.load(outputs + place * width + columns, mask=is_column, other=0.0).to(tl.float32)
        sums += tl.load(weights + slot) * values
    tl.store(total + row.to(tl.int64) * width + columns, sums.to(total.dtype.element_ty), mask=is_column)
