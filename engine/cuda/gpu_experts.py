"""A mixture of experts on a GPU of any generation.

A slot is one row's use of one expert: slot t k + s is the s-th expert of row t. `mix`, for up to MAX_ROWS rows, is
bound by reading the weights of the chosen experts once; the order of its sums depends on the weights' shape alone.
`mix_many` sorts the slots by expert and multiplies tiles of them by tensor cores:

    slots by expert   | 0 0 0 0 0 | 2 2 | 3 3 3 3 3 3 3 |     tiles of 4:   0000 0... | 22.. | 3333 333.

Sums are float32. Needs Triton: import it where a CUDA device is chosen. Tile sizes are reasoned, not measured: nothing
here has run on a GPU yet. Twins: engine/ops/base.py, engine/experts/moe.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from engine.cuda import gpu_layers
from engine.cuda.gpu_choice import can_choose as can_choose
from engine.cuda.gpu_choice import choose_experts as choose_experts
from engine.cuda.gpu_stacks import load_weights
from engine.cuda.sizes import SLOT_TILES
from engine.layer_config import Activation

MAX_ROWS = 16  # of 8 slots each on 128 experts: 81 are hit on average, so weights are read 1.6 times, mostly from L2
# Outputs and depth of a program's tile: 32 weights a thread, in four 16-byte loads.
GATED_TILE = (4, 512)  # of both gate and up; 8 slots of 768 outputs make 1,536 programs
TILE = (8, 512)
STAGES = 4  # tiles in flight
SUM_TILE = 256  # outputs
SORT_BLOCK = 1024  # slots that a program compares at once
MANY_TILE = (64, 64)  # outputs and depth of a tile of `mix_many`
MANY_STAGES = 3
TORCH_GENERATIONS = (9, 10)  # compute capabilities where torch multiplies groups without a wait
TORCH_SLOTS = 64  # of an expert on average, from which that is faster

Form = tuple[str, Tensor | None, Tensor | None]  # of weights, and their tables
PLAIN: Form = ("plain", None, None)
HALVED = ("groups4", "minimums4", "mxfp4")  # two codes in a byte


KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)
LIMIT = tl.constexpr(7.0)
SLOPE = tl.constexpr(1.702)
GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): (1 + tanh(x)) / 2 is sigmoid(2 x)
GELU_CUBE = tl.constexpr(0.044715)


def mix_experts(
    rows: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up_form: Form, down_form: Form,
) -> Tensor:  # fmt: skip
    """See `mix` and `mix_many`; the fastest of all ways."""
    parts = rows, ids, weights, gate_up, down, activation
    is_plain = gate_up_form[0] == down_form[0] == PLAIN[0]
    is_bare = gate_up_bias is None and down_bias is None and activation != "clamped"
    if is_plain and is_bare and is_for_torch(rows, ids.numel(), down):
        return mix_groups(*parts)
    if is_plain and len(rows) <= MAX_ROWS:
        return mix(*parts, gate_up_bias, down_bias)
    return mix_many(*parts, gate_up_bias, down_bias, gate_up_form, down_form)


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


def mix_many(
    rows: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, gate_up_form: Form = PLAIN,
    down_form: Form = PLAIN,
) -> Tensor:  # fmt: skip
    """`mix` of any number of rows. The number of programs depends on it alone: nothing waits for the ids.

    Weights may be in few bits, which programs widen to the rows' dtype: see gpu_stacks.
    """
    (num_experts, depth, columns), (num_rows, top_k) = down.shape, ids.shape
    width = columns * (2 if down_form[0] in HALVED else 1)
    expected = (num_experts, 2 * width, depth // (2 if gate_up_form[0] in HALVED else 1))
    if rows.stride(1) != 1 or gate_up.shape != expected or depth != rows.shape[1]:
        raise ValueError(f"weights are {tuple(gate_up.shape)} and {tuple(down.shape)} for rows of {rows.shape[1]}")
    num_slots = num_rows * top_k
    tile = SLOT_TILES[num_slots > SLOT_TILES[0] * num_experts]
    order, starts, experts, _ = sort(ids, num_experts, tile, has_places=False)
    num_tiles = len(experts)
    gated = rows.new_empty(num_slots, width)
    products = torch.empty(num_slots, depth, dtype=torch.float32, device=rows.device)
    outputs, columns = MANY_TILE
    multiply_tiles[num_tiles, triton.cdiv(width, outputs)](
        rows, order, starts, experts, gate_up, *gate_up_form[1:], gate_up_bias, gated, rows.stride(0), top_k, width,
        depth, _width_of(gate_up_form), gate_up_form[0], activation, tile, outputs, columns, MANY_STAGES,
    )  # fmt: skip
    multiply_tiles[num_tiles, triton.cdiv(depth, outputs)](
        gated, order, starts, experts, down, *down_form[1:], down_bias, products, width, top_k, depth,
        width, _width_of(down_form), down_form[0], None, tile, outputs, columns, MANY_STAGES,
    )  # fmt: skip
    return add_slots(products, weights, None, rows.dtype)


def mix_groups(
    rows: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """`mix_many` of plain weights, without biases or clamps, by torch's products of groups, which some GPUs have."""
    order, starts, _, places = sort(ids, len(down), SLOT_TILES[-1], has_places=True)

    def multiply(rows: Tensor, weight: Tensor) -> Tensor:
        """[S, K], by expert; [E, N, K] |-> [S, N]"""
        return functional.grouped_mm(rows, weight.transpose(1, 2), offs=starts[1:])

    def activate_products(products: Tensor) -> Tensor:
        if activation == "silu":
            return gpu_layers.gate(products)
        gate, up = products.chunk(2, -1)
        return functional.gelu(gate, approximate="tanh") * up

    gated = activate_products(
        multiply(rows.index_select(0, order // ids.shape[1]), gate_up)
    )  # what it is made of is free by now
    return add_slots(multiply(gated, down), weights, places, rows.dtype)


def sort(ids: Tensor, num_experts: int, tile: int, has_places: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`sort_slots`' order, starts and experts, and each slot's place in the order if it is wanted."""
    num_slots = ids.numel()
    order, starts, experts, places = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_slots, num_experts + 1, num_slots // tile + num_experts, num_slots * has_places)
    )
    found = places if has_places else None
    sort_slots[(num_experts,)](ids, order, starts, experts, found, num_slots, num_experts, tile, SORT_BLOCK)
    return order, starts, experts, found


def _width_of(form: Form) -> int:
    """Columns of the form's tables; 1 without any."""
    return 1 if form[1] is None else form[1].shape[2]


def is_for_torch(rows: Tensor, num_slots: int, down: Tensor) -> bool:
    """Whether torch's grouped product is the faster one: elsewhere it waits for the sizes of groups on the host."""
    num_experts, *sizes = down.shape
    if rows.dtype is not torch.bfloat16 or any(size % 8 for size in sizes) or num_slots < TORCH_SLOTS * num_experts:
        return False
    return rows.device.type == "cuda" and torch.cuda.get_device_capability(rows.device)[0] in TORCH_GENERATIONS


def add_slots(outputs: Tensor, weights: Tensor, places: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Row t's sum over s of weights[t, s] * outputs[places[t k + s]], in float32.

    outputs: [T k, H], weights: [T, k] float32, both contiguous; places: [T k] int32, None for 0, 1, 2, ...
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


@triton.jit(do_not_specialize=["num_slots"])
def sort_slots(
    ids, order, starts, experts, places, num_slots, num_experts, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program e: where the slots of expert e begin, which they are, in order, and which tiles are its.

    ids: [S] |-> order: [S] slots by expert, places: [S] where each is in it, or None; starts: [E + 1]; experts:
    [S / TILE + E] of each tile. Expert e has those from starts[e] / TILE + e to starts[e + 1] / TILE + e, both
    included, of which the last may be empty.
    """
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_slots, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        chosen = tl.load(ids + slots, mask=slots < num_slots, other=num_experts)
        before += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    start = tl.sum(before)
    end = start + tl.sum(own)
    tl.store(starts + expert, start)
    tl.store(starts + expert + 1, end)
    place = start
    for begin in range(0, num_slots, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        is_own = tl.load(ids + slots, mask=slots < num_slots, other=num_experts) == expert
        ranks = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + place + ranks - 1, slots, mask=is_own)
        if places is not None:
            tl.store(places + slots, place + ranks - 1, mask=is_own)
        place += tl.sum(is_own.to(tl.int32))
    first, last = start // TILE + expert, end // TILE + expert
    for begin in range(first, last + 1, BLOCK):
        tiles = begin + tl.arange(0, BLOCK)
        tl.store(experts + tiles, expert, mask=tiles <= last)


@triton.jit
def multiply_tiles(
    x, order, starts, experts, w, scale, second, bias, y, row_stride, top_k, num_outputs, depth, table_width,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (t, i): block i of outputs of tile t of slots. See `sort_slots`; w, bias: as in `multiply_slots`.

    With an activation x has a row for top_k slots, [T, K], and y one for each slot by expert, [S, N]; without, x is
    such a y, and y has the slots in their own order. Weights are the left operand: few slots still fill a tensor core.
    """
    tile = tl.program_id(0)
    expert = tl.load(experts + tile)
    start, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    begin = start + (tile - start // ROWS - expert) * ROWS
    if begin >= end:
        return
    places = begin + tl.arange(0, ROWS)
    is_row = places < end
    slots = tl.load(order + places, mask=is_row, other=0).to(tl.int64)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    first = expert.to(tl.int64) * num_outputs  # the expert's first output in w
    sources = places.to(tl.int64)
    targets = slots
    if ACTIVATION is not None:
        first *= 2
        sources, targets = slots // top_k, places.to(tl.int64)
    inputs = x + sources[None, :] * row_stride
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    ups = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for column in tl.range(0, depth, COLUMNS, num_stages=STAGES):
        columns = column + tl.arange(0, COLUMNS)
        is_column = columns < depth
        is_inside = is_output[:, None] & is_column[None, :]
        values = tl.load(inputs + columns[:, None], mask=is_row[None, :] & is_column[:, None], other=0.0)
        weights = load_weights(
            w, scale, second, first + outputs, columns, is_inside, depth, table_width, FORM, values.dtype
        )
        sums = tl.dot(weights, values, sums, input_precision="ieee")
        if ACTIVATION is not None:
            weights = load_weights(
                w, scale, second, first + num_outputs + outputs, columns, is_inside, depth, table_width,
                FORM, values.dtype,
            )  # fmt: skip
            ups = tl.dot(weights, values, ups, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + first + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        if bias is not None:
            ups += tl.load(bias + first + num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        sums = activate(sums, ups, ACTIVATION)
    tl.store(
        y + targets[None, :] * num_outputs + outputs[:, None], sums.to(y.dtype.element_ty),
        mask=is_row[None, :] & is_output[:, None],
    )  # fmt: skip


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
            place = tl.load(places + slot).to(tl.int64)
        values = tl.load(outputs + place * width + columns, mask=is_column, other=0.0).to(tl.float32)
        sums += tl.load(weights + slot) * values
    tl.store(total + row.to(tl.int64) * width + columns, sums.to(total.dtype.element_ty), mask=is_column)
