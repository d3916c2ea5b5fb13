"""Layers with a state of each sequence on a GPU, token by token: gated short convolutions and Gated DeltaNets.

Loads are widened to float32; results are rounded once, when stored. Grids depend on numbers of rows and sequences only,
and nothing is read back: launches can be captured. Twin: hybrids/recurrent.py, whose names tensors have.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CONV_BLOCK = 256  # channels of a row per program of one warp: 16 bytes of bfloat16 for each thread
VALUE_BLOCK = 8  # columns of a memory per program of one warp: sums over keys stay in the warp; a sector per row
SEARCHED = tl.constexpr(256)  # starts per iteration of a search
NORM_EPS = tl.constexpr(1e-6)  # of the norms of queries and keys


@triton.jit
def find_sequence(starts, row, num_sequences):
    """How many sequences end before a row: the one that has it. starts: [num_sequences + 1]."""
    sequence = 0
    for begin in range(0, num_sequences, SEARCHED):
        at = begin + tl.arange(0, SEARCHED)
        is_before = tl.load(starts + 1 + at, mask=at < num_sequences, other=row + 1) <= row
        sequence += tl.sum(is_before.to(tl.int32), axis=0)
    return sequence


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x) to the last bits, near 0 too, where decays add up over many tokens.

    With z = e^-|x| it is max(x, 0) + log(1 + z), and that logarithm is 2 artanh(s), s = z / (2 + z) <= 1/3: a series
    in s^2 whose next term is s^14 / 15 < 2^-26.
    """
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    square = s * s
    series = square * (1.0 / 13.0) + (1.0 / 11.0)
    series = series * square + (1.0 / 9.0)
    series = series * square + (1.0 / 7.0)
    series = series * square + (1.0 / 5.0)
    series = series * square + (1.0 / 3.0)
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def convolve(
    rows, gate_distance, row_stride, weight, states, sources, targets, starts, slot_stride, num_sequences,
    channel, width, HAS_GATE: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """A block of `width` channels over the last TAPS tokens up to this program's row. Its last row writes new states.

    Pointers, for the block: rows to inputs in row 0, weight to [..., TAPS], states to [..., TAPS - 1] in slot 0. With a
    gate, inputs are multiplied by what lies gate_distance after them. Conditions on the row are limits of channels: the
    interpreter cannot combine masks of a block and of a number.
    """
    row = tl.program_id(0)
    sequence = find_sequence(starts, row, num_sequences)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    source, target = tl.load(sources + sequence), tl.load(targets + sequence)
    num_writers = tl.where(row + 1 == end, width, 0)
    result = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        other = row - (TAPS - 1 - tap)
        is_new = channel < tl.where(other >= begin, width, 0)
        given = rows + other.to(tl.int64) * row_stride
        x = tl.load(given, mask=is_new, other=0.0).to(tl.float32)
        if HAS_GATE:
            x *= tl.load(given + gate_distance, mask=is_new, other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            is_old = channel < tl.where((other < begin) & (source >= 0), width, 0)
            x += tl.load(states + source * slot_stride + (row - begin + tap), mask=is_old, other=0.0)
        if tap > 0:
            tl.store(states + target * slot_stride + (tap - 1), x, mask=channel < num_writers)
        result += x * tl.load(weight + tap, mask=channel < width, other=0.0)
    return result


@triton.jit(do_not_specialize=["num_sequences"])
def gated_conv_kernel(
    rows, weight, bias, sources, targets, starts, states, out, row_stride, slot_stride, head_stride, num_sequences,
    width, HEAD_DIM: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a row per program. rows: [T, 3 width], out: [T, width]."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < width
    own = states + channel // HEAD_DIM * head_stride + channel % HEAD_DIM * (TAPS - 1)
    result = convolve(
        rows + channel, 2 * width, row_stride, weight + channel * TAPS, own, sources, targets, starts, slot_stride,
        num_sequences, channel, width, True, TAPS,
    )  # fmt: skip
    if HAS_BIAS:
        result += tl.load(bias + channel, mask=mask, other=0.0)
    row = tl.program_id(0).to(tl.int64)
    result *= tl.load(rows + row * row_stride + width + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + channel, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_sequences"])
def delta_conv_kernel(
    rows, weight, sources, targets, starts, query, key, value, mixed,
    row_stride, slot_stride, key_stride, value_stride, num_sequences,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a row's queries, keys or values per program, up to SiLU. mixed: [T, those three] float32."""
    key_blocks: tl.constexpr = tl.cdiv(KEY_WIDTH, BLOCK)
    part = tl.minimum(tl.program_id(1) // key_blocks, 2)
    channel = (tl.program_id(1) - part * key_blocks) * BLOCK + tl.arange(0, BLOCK)  # of the part
    if part == 2:
        states = value + channel // VALUE_DIM * value_stride + channel % VALUE_DIM * (TAPS - 1)
    else:
        states = query if part == 0 else key
        states = states + channel // KEY_DIM * key_stride + channel % KEY_DIM * (TAPS - 1)
    width = tl.where(part == 2, VALUE_WIDTH, KEY_WIDTH)
    column = part * KEY_WIDTH + channel
    result = convolve(
        rows + column, 0, row_stride, weight + column * TAPS, states, sources, targets, starts, slot_stride,
        num_sequences, channel, width, False, TAPS,
    )  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tl.store(mixed + row * (2 * KEY_WIDTH + VALUE_WIDTH) + column, silu(result), mask=channel < width)


@triton.jit
def load_token(
    query_of, value_of, gates_of, row, end, i, j, width, row_stride,
    KEY_WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Query, key [BLOCK_K, 1], value [1, BLOCK_V], a and b; zeros for a row from `end` on. See `delta_kernel`."""
    is_there = row < end
    in_keys, in_values = i < tl.where(is_there, KEY_DIM, 0), j < tl.where(is_there, VALUE_DIM, 0)
    query, gates = query_of + row * width, gates_of + row * row_stride
    return (
        tl.load(query, mask=in_keys, other=0.0),
        tl.load(query + KEY_WIDTH, mask=in_keys, other=0.0),
        tl.load(value_of + row * width, mask=in_values, other=0.0),
        tl.load(gates + NUM_HEADS, mask=is_there, other=0.0).to(tl.float32),
        tl.load(gates, mask=is_there, other=0.0).to(tl.float32),
    )


@triton.jit
def delta_kernel(
    mixed, rows, decay_rate, dt_bias, sources, targets, starts, memory, found, row_stride, slot_stride, head_stride,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of the memory of a sequence's value head per program; tokens are loaded one ahead.

    mixed: [T, queries, keys, values] after the convolution; found: [T, NUM_HEADS * VALUE_DIM].
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, BLOCK_K)[:, None]
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    in_values = j < VALUE_DIM
    source, target = tl.load(sources + sequence), tl.load(targets + sequence)
    own = memory + head.to(tl.int64) * head_stride + i * VALUE_DIM + j
    is_kept = (i < tl.where(source >= 0, KEY_DIM, 0)) & in_values
    state = tl.load(own + source * slot_stride, mask=is_kept, other=0.0)
    rate, bias = tl.load(decay_rate + head), tl.load(dt_bias + head)

    key_width: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    width: tl.constexpr = 2 * key_width + NUM_HEADS * VALUE_DIM
    query_of = mixed + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM + i
    value_of = mixed + 2 * key_width + head * VALUE_DIM + j
    gates_of = rows + width + NUM_HEADS * VALUE_DIM + head
    begin, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    query, key, value, a, b = load_token(
        query_of, value_of, gates_of, begin, end, i, j, width, row_stride, key_width, NUM_HEADS, KEY_DIM, VALUE_DIM
    )
    for row in range(begin, end):
        next_query, next_key, next_value, next_a, next_b = load_token(
            query_of, value_of, gates_of, row + 1, end, i, j, width, row_stride, key_width, NUM_HEADS, KEY_DIM,
            VALUE_DIM,
        )  # fmt: skip
        query *= 1.0 / tl.sqrt((tl.sum(query * query) + NORM_EPS) * KEY_DIM)
        key *= 1.0 / tl.sqrt(tl.sum(key * key) + NORM_EPS)
        state *= tl.exp(rate * softplus(a + bias))
        change = (value - tl.sum(state * key, axis=0, keep_dims=True)) / (1.0 + tl.exp(-b))
        state += key * change
        place = found + row * (NUM_HEADS * VALUE_DIM) + head * VALUE_DIM + j
        tl.store(place, tl.sum(state * query, axis=0, keep_dims=True), mask=in_values)
        query, key, value, a, b = next_query, next_key, next_value, next_a, next_b
    tl.store(own + target * slot_stride, state, mask=(i < KEY_DIM) & in_values)


@triton.jit
def gate_norm_kernel(
    found, gates, weight, out, eps, row_stride,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's head per program. found, out: [T, NUM_HEADS * VALUE_DIM]; gates: in row 0."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    mask = i < VALUE_DIM
    place = row * (NUM_HEADS * VALUE_DIM) + head * VALUE_DIM + i
    x = tl.load(found + place, mask=mask, other=0.0)
    x *= 1.0 / tl.sqrt(tl.sum(x * x) / VALUE_DIM + eps)
    x *= tl.load(weight + i, mask=mask, other=0.0)
    gate = tl.load(gates + row * row_stride + head * VALUE_DIM + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (x * silu(gate)).to(out.dtype.element_ty), mask=mask)


def gated_conv(
    rows: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, targets: Tensor, starts: Tensor, states: Tensor
) -> Tensor:
    """See `RecurrentOps.gated_conv`."""
    (num_rows, num_columns), (width, taps) = rows.shape, weight.shape
    _check(rows, [weight], [states])
    if num_columns != 3 * width or (states.shape[1] * states.shape[2], states.shape[3]) != (width, taps - 1):
        raise ValueError(f"rows {tuple(rows.shape)} and states {tuple(states.shape)}, weights {tuple(weight.shape)}")
    out = rows.new_empty(num_rows, width)
    gated_conv_kernel[(num_rows, triton.cdiv(width, CONV_BLOCK))](
        rows, weight, weight if bias is None else bias, sources, targets, starts, states, out,
        rows.stride(0), *states.stride()[:2], len(sources), width,
        HEAD_DIM=states.shape[2], TAPS=taps, HAS_BIAS=bias is not None, BLOCK=CONV_BLOCK, num_warps=1,
    )  # fmt: skip
    return out


def delta_net(
    rows: Tensor, conv: Tensor, decay_rate: Tensor, dt_bias: Tensor, norm: Tensor, eps: float,
    sources: Tensor, targets: Tensor, starts: Tensor, query: Tensor, key: Tensor, value: Tensor, memory: Tensor,
) -> Tensor:  # fmt: skip
    """See `RecurrentOps.delta_net`; the last four are the states."""
    num_rows, taps = len(rows), conv.shape[1]
    num_key_heads, (num_heads, key_dim, value_dim) = key.shape[1], memory.shape[1:]
    key_width, value_width = num_key_heads * key_dim, num_heads * value_dim
    _check(rows, [conv, decay_rate, dt_bias, norm], [query, key, value, memory])
    expected = 2 * key_width + 2 * value_width + 2 * num_heads
    if rows.shape[1] != expected or len(conv) != 2 * key_width + value_width or query.stride() != key.stride():
        raise ValueError(f"rows {tuple(rows.shape)}, expected {expected} columns, weights {tuple(conv.shape)}")
    mixed = torch.empty(num_rows, len(conv), dtype=torch.float32, device=rows.device)
    delta_conv_kernel[(num_rows, 2 * triton.cdiv(key_width, CONV_BLOCK) + triton.cdiv(value_width, CONV_BLOCK))](
        rows, conv, sources, targets, starts, query, key, value, mixed,
        rows.stride(0), *key.stride()[:2], value.stride(1), len(sources),
        KEY_WIDTH=key_width, VALUE_WIDTH=value_width, KEY_DIM=key_dim, VALUE_DIM=value_dim, TAPS=taps,
        BLOCK=CONV_BLOCK, num_warps=1,
    )  # fmt: skip
    found = mixed.new_empty(num_rows, value_width)
    block = min(VALUE_BLOCK, triton.next_power_of_2(value_dim))
    delta_kernel[(triton.cdiv(value_dim, block), num_heads, len(sources))](
        mixed, rows, decay_rate, dt_bias, sources, targets, starts, memory, found,
        rows.stride(0), *memory.stride()[:2],
        NUM_KEY_HEADS=num_key_heads, NUM_HEADS=num_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=block, num_warps=1,
    )  # fmt: skip
    out = rows.new_empty(num_rows, value_width)
    gate_norm_kernel[(num_rows, num_heads)](
        found, rows[:, len(conv) :], norm, out, eps, rows.stride(0),
        NUM_HEADS=num_heads, VALUE_DIM=value_dim, BLOCK=triton.next_power_of_2(value_dim), num_warps=1,
    )  # fmt: skip
    return out


def _check(rows: Tensor, weights: list[Tensor], states: list[Tensor]) -> None:
    """ValueError if strides or types are not those that kernels read."""
    is_read = rows.stride(1) == 1 and all(weight.is_contiguous() for weight in weights)
    is_read &= all(one.stride()[2:] == (one.shape[3], 1) for one in states)
    is_read &= len({one.stride(0) for one in states}) == 1
    if not is_read or {one.dtype for one in (*weights, *states)} != {torch.float32}:
        raise ValueError(
            f"states have strides {[one.stride() for one in states]} and rows {rows.stride()}, expected contiguous "
            "heads of float32 in slots of one size and contiguous columns"
        )
