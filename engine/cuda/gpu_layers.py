"""The decoder's work between products on a GPU, one Triton kernel each: norms, gate, rotation with the write of new KV,
rounding to e4m3.

Loads are widened to float32; results are rounded once, when stored. Twins: engine/ops/base.py, engine/attention/qkv.py
and engine/formats/fp8.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024
HEADS_BLOCK = 8  # heads of a token per program: 1,024 elements at D = 128
PAGES_BLOCK = 256
ROUND_BLOCK = 4096  # values per program, if rows are shorter


@triton.jit
def norm_kernel(rows, delta, weight, out, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """One row per program. rows, delta, out: [T, width], contiguous; with a delta, rows += delta first."""
    begin = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(rows + begin + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = x + tl.load(delta + begin + column, mask=mask, other=0.0).to(tl.float32)
        stored = added.to(rows.dtype.element_ty)
        tl.store(rows + begin + column, stored, mask=mask)
        x = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + begin + column, (x * scale * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """gate_up: [T, 2 width], out: [T, width], contiguous; BLOCK columns of a row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope_and_write_kernel(
    query_key, value, cos, signed_sin, norm, keys, values, slot_mapping,
    query_key_token, value_token, page_stride, head_stride, token_stride, num_heads, num_kv_heads, eps, kv_limit,
    HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_LIMIT: tl.constexpr,
    HALF: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """BLOCK_HEADS heads of a token per program: rotates queries in place, writes keys and values to their page.

    keys, values: one layer of the pool, [num_pages, Hkv, page_tokens, D] with equal strides.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    dim = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    in_half = dim < HALF
    num_rotated = num_heads + num_kv_heads
    is_rotated = (head < num_rotated) & in_half
    is_query = (head < num_heads) & in_half
    is_key = (head >= num_heads) & is_rotated
    is_value = (head >= num_rotated) & (head < num_rotated + num_kv_heads) & in_half
    own = query_key + token * query_key_token + head * (2 * HALF) + dim
    x = tl.load(own, mask=is_rotated, other=0.0).to(tl.float32)
    y = tl.load(own + HALF, mask=is_rotated, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x + y * y, axis=1) / (2 * HALF) + eps)
        weights = norm + head * (2 * HALF) + dim
        x = x * scale[:, None] * tl.load(weights, mask=is_rotated, other=0.0).to(tl.float32)
        y = y * scale[:, None] * tl.load(weights + HALF, mask=is_rotated, other=0.0).to(tl.float32)
    if HAS_ROPE:
        table = token * (2 * HALF) + dim
        cos_x = tl.load(cos + table, mask=in_half, other=0.0).to(tl.float32)
        cos_y = tl.load(cos + table + HALF, mask=in_half, other=0.0).to(tl.float32)
        sin_x = tl.load(signed_sin + table, mask=in_half, other=0.0).to(tl.float32)
        sin_y = tl.load(signed_sin + table + HALF, mask=in_half, other=0.0).to(tl.float32)
        rotated_x = x * cos_x + y * sin_x
        y = y * cos_y + x * sin_y
        x = rotated_x
        tl.store(own, x.to(query_key.dtype.element_ty), mask=is_query)
        tl.store(own + HALF, y.to(query_key.dtype.element_ty), mask=is_query)
    # one block: key rows hold keys, value rows values, other rows nothing
    given = value + token * value_token + (head - num_rotated) * (2 * HALF) + dim
    x = tl.where(is_value, tl.load(given, mask=is_value, other=0.0).to(tl.float32), x)
    y = tl.where(is_value, tl.load(given + HALF, mask=is_value, other=0.0).to(tl.float32), y)
    if HAS_LIMIT:
        x = tl.minimum(tl.maximum(x, -kv_limit), kv_limit)
        y = tl.minimum(tl.maximum(y, -kv_limit), kv_limit)
    slot = tl.load(slot_mapping + token)
    place = slot // PAGE_TOKENS * page_stride + slot % PAGE_TOKENS * token_stride + dim
    key_place = place + (head - num_heads) * head_stride
    value_place = place + (head - num_rotated) * head_stride
    tl.store(keys + key_place, x.to(keys.dtype.element_ty), mask=is_key)
    tl.store(keys + key_place + HALF, y.to(keys.dtype.element_ty), mask=is_key)
    tl.store(values + value_place, x.to(values.dtype.element_ty), mask=is_value)
    tl.store(values + value_place + HALF, y.to(values.dtype.element_ty), mask=is_value)


@triton.jit(do_not_specialize=["num_groups"])
def round_kernel(
    rows, codes, scale, num_groups, width, per_row, row_stride, smallest, limit,
    HAS_GATE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of `width` columns per program, each with a scale. rows: [T, per_row * width], with a gate twice as
    many columns, as in `gate_kernel`; codes: [T, per_row * width] e4m3, contiguous, scale: [T, per_row] float32."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (group < num_groups)[:, None] & (column < width)
    given = rows + (group // per_row * row_stride + group % per_row * width)[:, None] + column
    x = tl.load(given, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATE:
        x = x / (1.0 + tl.exp(-x)) * tl.load(given + per_row * width, mask=mask, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(x), axis=1), smallest)
    factor = tl.div_rn(peak, limit)  # [GROUPS]
    tl.store(scale + group, factor, mask=group < num_groups)
    # factors as wide as x: div_rn does not broadcast. A quotient may slightly exceed 448, which still rounds to it
    quotient = tl.div_rn(x, tl.broadcast_to(factor[:, None], (GROUPS, BLOCK)))
    tl.store(codes + group[:, None] * width + column, quotient.to(codes.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"])  # grows with sequences; each specialisation would compile again
def join_pages_kernel(table, starts, out, table_stride, BLOCK: tl.constexpr):
    """Concatenates the first pages of each row of a table. table: [B, P], starts: [B + 1], out: [starts[B]]."""
    row = tl.program_id(0)
    begin = tl.load(starts + row)
    count = tl.load(starts + row + 1) - begin
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pages = tl.load(table + row.to(tl.int64) * table_stride + column, mask=column < count, other=0)
    tl.store(out + begin + column, pages, mask=column < count)


def gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row times the second. [T, 2 I] |-> [T, I]"""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    gate_kernel[(num_rows, triton.cdiv(width, GATE_BLOCK))](gate_up, out, width, BLOCK=GATE_BLOCK)
    return out


def add_norm(rows: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta`, if there is one, to `rows` in place, then float32; returns the RMSNorm of the sum, [T, H]."""
    num_rows, width = rows.shape
    if not rows.is_contiguous() or (delta is not None and not delta.is_contiguous()):
        raise ValueError(f"rows have strides {rows.stride()}, expected contiguous rows")
    out = torch.empty_like(rows if delta is None else delta)
    block = triton.next_power_of_2(width)
    norm_kernel[(num_rows,)](
        rows, rows if delta is None else delta, weight, out, width, eps,
        HAS_DELTA=delta is not None, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    return out


def round_rows(
    rows: Tensor, width: int, smallest: float, limit: float, has_gate: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """rows: [T, K], or [T, 2 K] to be gated first |-> codes [T, K] e4m3, scale [T, K / width] float32.

    Columns of rows are contiguous. A scale is max(peak, smallest) / limit of `width` columns, which divides K.
    """
    num_rows, num_columns = len(rows), rows.shape[1] // (2 if has_gate else 1)
    per_row, rest = divmod(num_columns, width)
    if rows.stride(1) != 1 or rest:
        raise ValueError(
            f"rows have {num_columns} columns and strides {rows.stride()}, "
            f"expected contiguous columns in groups of {width}"
        )
    codes = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=rows.device)
    scale = torch.empty(num_rows, per_row, dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(width)
    together = max(1, ROUND_BLOCK // block)
    round_kernel[(triton.cdiv(num_rows * per_row, together),)](
        rows, codes, scale, num_rows * per_row, width, per_row, rows.stride(0), smallest, limit,
        HAS_GATE=has_gate, GROUPS=together, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    return codes, scale


def rope_and_write(
    query_key: Tensor, value: Tensor, cos: Tensor | None, signed_sin: Tensor | None, norm: Tensor | None, eps: float,
    keys: Tensor, values: Tensor, slot_mapping: Tensor, kv_limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """Norm and rotate heads; write keys and values to their pages. Returns queries: [T, Hq, D], a view.

    query_key: [T, Hq + Hkv, D], queries in place; value: [T, Hkv, D]; cos, signed_sin: [T, 1, D], None: no rotation;
    norm: [Hq + Hkv, D], None: none. keys, values: a layer of the pool, [num_pages, Hkv, page_tokens, D] with equal
    strides; slot_mapping: [T] int64, see `Batch`. `kv_limit`: largest number that the pool can hold; 0: no limit.
    """
    num_tokens, num_rotated, head_dim = query_key.shape
    if keys.stride() != values.stride() or {t.stride(-1) for t in (keys, query_key, value)} != {1}:
        raise ValueError(
            f"keys have strides {keys.stride()}, values {values.stride()}, expected equal ones ending in 1"
        )
    if (query_key.stride(1), value.stride(1)) != (head_dim, head_dim):
        raise ValueError(f"heads have strides {query_key.stride()} and {value.stride()}, expected contiguous heads")
    num_kv_heads = value.shape[1]
    num_blocks = triton.cdiv(num_rotated + num_kv_heads, HEADS_BLOCK)
    rope_and_write_kernel[(num_tokens, num_blocks)](
        query_key, value, query_key if cos is None else cos, query_key if signed_sin is None else signed_sin,
        query_key if norm is None else norm, keys, values, slot_mapping,
        query_key.stride(0), value.stride(0), *keys.stride()[:3], num_rotated - num_kv_heads, num_kv_heads,
        eps, kv_limit,
        HAS_ROPE=cos is not None, HAS_NORM=norm is not None, HAS_LIMIT=kv_limit > 0,
        HALF=head_dim // 2, PAGE_TOKENS=keys.shape[2], BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=HEADS_BLOCK,
    )  # fmt: skip
    return query_key[:, : num_rotated - num_kv_heads]


def join_pages(table: Tensor, starts: Tensor, out: Tensor) -> None:
    """Copy the first starts[b + 1] - starts[b] pages of each row b of `table` to `out`, from starts[b] on.

    table: [B, P] int32, rows contiguous; starts: [B + 1] int32; out: [at least starts[B]] int32. All on the device.
    """
    num_rows, width = table.shape
    grid = (num_rows, triton.cdiv(width, PAGES_BLOCK))
    join_pages_kernel[grid](table, starts, out, table.stride(0), BLOCK=PAGES_BLOCK)
