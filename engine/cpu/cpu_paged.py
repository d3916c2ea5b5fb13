"""Attention by the C++ kernel in cpu_paged.cpp: reads pages in place, uses torch's thread count.

The kernel checks nothing: see engine/cpu/checks.py.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.batch import Batch
from engine.cpu import checks
from engine.cpu.cpu_layers import apply_rope
from engine.cpu.cpu_math import Math
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS

BLOCK_ROWS = 256  # query rows of a work item share one packed key tile; 64 KB of output at D=64
LEAST_SHARED_BYTES = 1 << 20  # of keys that threads share: with fewer, one is done before another is awake
Ints = NDArray[np.int64]
NO_WINDOW = 1 << 40  # wider than any context


class _BatonBatch(ctypes.Structure):
    """struct BatonBatch of cpu_paged.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pool", "cu_seqlens_q", "seq_lens", "page_table")),
        *((name, ctypes.c_void_p) for name in ("slot_mapping", "blocks", "ancestors")),
        *((name, ctypes.c_int64) for name in ("page_table_width", "num_tokens", "num_blocks", "block_tokens")),
        *((name, ctypes.c_int64) for name in ("page_stride", "head_stride", "layer_stride", "kv_stride")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "page_tokens", "head_dim", "value_dim")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class _BatonLayer(ctypes.Structure):
    """struct BatonLayer of cpu_paged.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out")),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_token", "value_head", "layer", "window")),
        ("sinks", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A batch over a checked pool."""

    batch: Batch
    pool: Tensor
    blocks: NDArray[np.int32]  # [num_blocks, 2], see plan_blocks
    arguments: _BatonBatch  # points into the three above


class CpuPagedAttention:
    """An `AttentionBackend`. Owns the loaded kernel and the plan of the current step. One caller at a time."""

    name = "cpu_paged"
    is_capturable = False

    def __init__(self, shape: AttentionShape, kernel: ctypes.CDLL, math: Math) -> None:
        """math: for bfloat16 pages. ValueError if heads do not divide or the scale is not > 0."""
        if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"num_heads {shape.num_heads} is not a multiple of num_kv_heads {shape.num_kv_heads}")
        if not shape.scale > 0:
            raise ValueError(f"scale is {shape.scale}, expected > 0")
        self._shape = shape
        self._attend = kernel.baton_attend
        self._attend.restype = None
        self._attend.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 3]
        self._math = math
        self._plan: _Plan | None = None

    def plan(self, pool: Tensor, batch: Batch) -> None:
        """See `AttentionBackend.plan`."""
        last, self._plan = self._plan, None
        if last is not None and last.pool is pool:
            arguments = _BatonBatch.from_buffer_copy(last.arguments)
        else:
            arguments = self._describe(pool)
        if checks.ARE_ON:
            checks.check_batch(batch, pool.shape[PAGES], arguments.page_tokens)
        lens = batch.query_lens_host.astype(np.int64), batch.seq_lens_host.astype(np.int64)
        blocks = plan_blocks(*lens, arguments.block_tokens)
        arguments.blocks, arguments.num_blocks = blocks.ctypes.data, len(blocks)
        arguments.cu_seqlens_q = batch.cu_seqlens_q.data_ptr()
        arguments.seq_lens = batch.seq_lens.data_ptr()
        arguments.page_table = batch.page_table.data_ptr()
        arguments.slot_mapping = batch.slot_mapping.data_ptr()
        arguments.ancestors = None if batch.ancestors is None else batch.ancestors.data_ptr()
        arguments.page_table_width = batch.page_table.shape[1]
        arguments.num_tokens = batch.token_ids.shape[0]
        if self._shape.num_kv_heads == 1:  # its query heads as several, which all have the same keys
            kept_bytes = int(lens[1].sum()) * self._shape.head_dim * pool.element_size()
            num_threads = torch.get_num_threads() if kept_bytes >= LEAST_SHARED_BYTES else 1
            parts = count_head_parts(self._shape.num_heads, len(blocks), num_threads)
            arguments.num_kv_heads, arguments.head_stride = parts, 0
        self._plan = _Plan(batch, pool, blocks, arguments)

    def _describe(self, pool: Tensor) -> _BatonBatch:
        """The fields that are the same for all batches over `pool`. ValueError if it does not fit the model."""
        shape = self._shape
        _check_pool(pool, shape)
        page_stride, head_stride, layer_stride, kv_stride = map(pool.stride, (PAGES, KV_HEADS, LAYERS, KEY_VALUE))
        return _BatonBatch(
            pool=pool.data_ptr(),
            block_tokens=max(1, BLOCK_ROWS * shape.num_kv_heads // shape.num_heads),
            page_stride=page_stride,
            head_stride=head_stride,
            layer_stride=layer_stride,
            kv_stride=0 if shape.value_dim else kv_stride,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            page_tokens=pool.shape[TOKENS],
            head_dim=shape.head_dim,
            value_dim=shape.value_dim or shape.head_dim,
            scale=shape.scale,
            softcap=shape.softcap,
        )

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "CpuPagedAttention":
        return self

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        plan = self._plan
        assert plan is not None, "attend without a plan"
        query, key, value = apply_rope_in_place(heads)
        num_tokens, dtype = plan.arguments.num_tokens, plan.pool.dtype
        shape, has_new = self._shape, value.shape[1] > 0
        if checks.ARE_ON:
            self._check(plan, layer, {"query": query, "key": key, "value": value}, window, sinks)
        out = torch.empty((num_tokens, shape.num_heads, shape.value_dim or shape.head_dim), dtype=dtype)
        arguments = _BatonLayer(
            query.data_ptr(),
            key.data_ptr() if has_new else None,
            value.data_ptr() if has_new else None,
            out.data_ptr(),
            *query.stride()[:2],
            key.stride(0),
            key.stride(1) if shape.num_kv_heads > 1 else 0,
            value.stride(0),
            value.stride(1) if shape.num_kv_heads > 1 else 0,
            layer,
            NO_WINDOW if window is None else window,
            None if sinks is None else sinks.data_ptr(),
        )
        self._attend(
            ctypes.addressof(plan.arguments), ctypes.addressof(arguments), dtype is torch.float32, self._math,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _check(
        self, plan: _Plan, layer: int, heads: Mapping[str, Tensor], window: int | None, sinks: Tensor | None
    ) -> None:  # fmt: skip
        """ValueError names what does not fit."""
        shape, num_tokens = self._shape, plan.arguments.num_tokens
        for name, rows in heads.items():
            num_heads = shape.num_heads if name == "query" else shape.num_kv_heads
            if name == "query" or heads["value"].shape[1]:
                checks.check_heads(name, rows, plan.pool.dtype, num_tokens, num_heads, shape.head_dim)
        if not 0 <= layer < plan.pool.shape[LAYERS]:
            raise ValueError(f"layer {layer} is outside the pool's {plan.pool.shape[LAYERS]} layers")
        if window is not None and window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
        if sinks is not None:
            checks.check_tensor("sinks", sinks, torch.float32, shape.num_heads)


def apply_rope_in_place(heads: QKV) -> tuple[Tensor, Tensor, Tensor]:
    """Like `QKV.ready`, in place where possible."""
    rope = heads.rope
    if rope is not None and apply_rope(heads.query_key, rope.cos, rope.signed_sin, rope.norm, rope.eps):
        heads = heads._replace(rope=None)
    return heads.ready()


def plan_blocks(query_lens: Ints, seq_lens: Ints, block_tokens: int) -> NDArray[np.int32]:
    """[num_blocks, 2]: (sequence, first of up to `block_tokens` new tokens), covering every new token.

    Blocks with the most keys come first: threads take them in this order, so the last blocks are short.
    """
    if not np.count_nonzero(query_lens != 1):  # plain decode: skips the ten operations below
        decode = np.zeros((len(query_lens), 2), np.int32)
        decode[:, 0] = np.argsort(-seq_lens)
        return decode
    counts = -(-query_lens // block_tokens)  # [B]
    sequences = np.repeat(np.arange(len(counts)), counts)  # [num_blocks]
    earlier = np.cumsum(counts) - counts  # [B], blocks of the sequences before
    firsts = (np.arange(len(sequences)) - earlier[sequences]) * block_tokens
    new_tokens = query_lens[sequences]
    num_keys = (seq_lens[sequences] - new_tokens) + np.minimum(firsts + block_tokens, new_tokens)
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((sequences[order], firsts[order]), 1).astype(np.int32)


def count_head_parts(num_heads: int, num_blocks: int, num_threads: int) -> int:
    """Into how many parts the query heads of one KV head are divided, so that each thread has work: they read the same
    keys at about the same time, so memory is read once.

    With a thread for each head there is one part: each part packs the keys for itself, and 2 heads on 2 threads of an
    AVX2 CPU took 1.1 (bfloat16) to 1.5 (float32) times as long in two parts as in one.
    """
    wanted = -(-num_threads // max(num_blocks, 1))
    return next(count for count in range(wanted, num_heads + 1) if num_heads % count == 0) if wanted < num_heads else 1


def _check_pool(pool: Tensor, shape: AttentionShape) -> None:
    expected = {KV_HEADS: shape.num_kv_heads, KEY_VALUE: 1 if shape.value_dim else 2, HEAD_DIM: shape.head_dim}
    if pool.dim() != 6 or any(pool.shape[axis] != size for axis, size in expected.items()):
        raise ValueError(f"pool is {tuple(pool.shape)}, expected sizes {expected} by axis (wire.kv_layout)")
    if pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"pool is {pool.dtype}, expected float32 or bfloat16")
    # pages may have gaps between them: the draft model's part of each page
    if not pool.is_cpu or not pool[:1].is_contiguous() or pool.stride(PAGES) < pool[0].numel():
        raise ValueError(f"pool on {pool.device} with strides {pool.stride()}, expected contiguous pages on cpu")
