"""Attention by the C++ kernel in cpu_paged.cpp: reads pages in place, uses torch's thread count.

The kernel checks nothing: `plan` checks the batch, and every call checks the layer's tensors.
"""

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.batch import Batch
from engine.cpu.cpu_layers import apply_rope
from engine.cpu.cpu_math import Math
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS

BLOCK_ROWS = 256  # query rows of a work item share one packed key tile; 64 KB of output at D=64
Ints = NDArray[np.int64]
NO_WINDOW = 1 << 40  # wider than any context


class _BatonBatch(ctypes.Structure):
    """struct BatonBatch of cpu_paged.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pool", "cu_seqlens_q", "seq_lens", "page_table")),
        *((name, ctypes.c_void_p) for name in ("slot_mapping", "blocks")),
        *((name, ctypes.c_int64) for name in ("page_table_width", "num_tokens", "num_blocks", "block_tokens")),
        *((name, ctypes.c_int64) for name in ("page_stride", "head_stride", "layer_stride", "kv_stride")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "page_tokens", "head_dim")),
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
    """A checked batch over a checked pool."""

    batch: Batch
    pool: Tensor
    blocks: NDArray[np.int32]  # [num_blocks, 2], see plan_blocks
    arguments: _BatonBatch  # points into the three above

    @property
    def num_layers(self) -> int:
        return self.pool.shape[LAYERS]


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
        """See `AttentionBackend.plan`. ValueError names what does not fit."""
        last, self._plan = self._plan, None
        if last is not None and last.pool is pool:
            arguments = _BatonBatch.from_buffer_copy(last.arguments)
        else:
            last, arguments = None, self._describe(pool)
        checked = None if last is None else last.batch
        query_lens, seq_lens = check_batch(batch, pool.shape[PAGES], arguments.page_tokens, checked)
        if last is not None and last.batch.query_lens_host is batch.query_lens_host:
            blocks = last.blocks  # still cover the queries; their order affects only the balance between threads
        else:
            blocks = plan_blocks(query_lens, seq_lens, arguments.block_tokens)
            arguments.blocks, arguments.num_blocks = blocks.ctypes.data, len(blocks)
        arguments.cu_seqlens_q = batch.cu_seqlens_q.data_ptr()
        arguments.seq_lens = batch.seq_lens.data_ptr()
        arguments.page_table = batch.page_table.data_ptr()
        arguments.slot_mapping = batch.slot_mapping.data_ptr()
        arguments.page_table_width = batch.page_table.shape[1]
        arguments.num_tokens = batch.token_ids.shape[0]
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
            kv_stride=kv_stride,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            page_tokens=pool.shape[TOKENS],
            head_dim=shape.head_dim,
            scale=shape.scale,
            softcap=shape.softcap,
        )

    def correct(self, batch: Batch, lag: Tensor) -> None:
        assert self._plan is not None
        self.plan(self._plan.pool, replace(batch, seq_lens_host=batch.seq_lens.numpy()))

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "CpuPagedAttention":
        return self

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`. ValueError names what does not fit; the pool is then unchanged."""
        plan = self._plan
        if plan is None:
            raise ValueError("attend without a plan")
        query, key, value = apply_rope_in_place(heads)
        num_tokens, dtype = plan.arguments.num_tokens, plan.pool.dtype
        shape, has_new = self._shape, value.shape[1] > 0
        _check_heads("query", query, (num_tokens, shape.num_heads, shape.head_dim), dtype)
        if has_new:
            _check_heads("key", key, (num_tokens, shape.num_kv_heads, shape.head_dim), dtype)
            _check_heads("value", value, (num_tokens, shape.num_kv_heads, shape.head_dim), dtype)
        if not 0 <= layer < plan.num_layers:
            raise ValueError(f"layer {layer} is outside the pool's {plan.num_layers} layers")
        if window is not None and window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
        if sinks is not None:
            _check_tensor("sinks", sinks, torch.float32, shape.num_heads)
        out = torch.empty((num_tokens, shape.num_heads, shape.head_dim), dtype=dtype)
        arguments = _BatonLayer(
            query.data_ptr(),
            key.data_ptr() if has_new else None,
            value.data_ptr() if has_new else None,
            out.data_ptr(),
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            layer,
            NO_WINDOW if window is None else window,
            None if sinks is None else sinks.data_ptr(),
        )
        self._attend(
            ctypes.addressof(plan.arguments), ctypes.addressof(arguments), dtype is torch.float32, self._math,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


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


def check_batch(batch: Batch, num_pages: int, page_tokens: int, checked: Batch | None = None) -> tuple[Ints, Ints]:
    """The lengths of all queries and contexts.

    ValueError names the first value of `batch` that would reach outside a pool of that size. `checked`: a batch that
    passed, usually that of the previous decode step; fields that are the same objects are not checked again.
    """
    num_tokens, num_sequences = batch.token_ids.shape[0], len(batch.query_lens_host)
    width = batch.page_table.shape[-1]
    has_queries = (
        checked is not None
        and checked.query_lens_host is batch.query_lens_host
        and checked.cu_seqlens_q is batch.cu_seqlens_q
        and checked.token_ids.shape[0] == num_tokens
    )
    has_pages = checked is not None and checked.page_table is batch.page_table and has_queries
    if not has_queries:
        _check_tensor("cu_seqlens_q", batch.cu_seqlens_q, torch.int32, num_sequences + 1)
    _check_tensor("seq_lens", batch.seq_lens, torch.int32, num_sequences)
    if not has_pages:
        _check_tensor("page_table", batch.page_table, torch.int32, num_sequences, width)
    _check_tensor("slot_mapping", batch.slot_mapping, torch.int64, num_tokens)
    query_lens: Ints = batch.query_lens_host.astype(np.int64)
    seq_lens: Ints = batch.seq_lens_host.astype(np.int64)
    if np.count_nonzero(batch.seq_lens.numpy() != seq_lens):
        raise ValueError(f"seq_lens {batch.seq_lens.tolist()} differ from the host's {batch.seq_lens_host}")
    wrong = (query_lens < 0) | (query_lens > seq_lens)
    if np.count_nonzero(wrong):
        index = wrong.argmax()
        raise ValueError(f"{query_lens[index]} new tokens in a context of {seq_lens[index]}")
    if np.count_nonzero(seq_lens > width * page_tokens):
        raise ValueError(f"context of {seq_lens.max()} tokens in a page table of {width} pages of {page_tokens}")
    if not has_queries:
        starts = batch.cu_seqlens_q.numpy()
        if starts[0] != 0 or starts[-1] != num_tokens or np.count_nonzero(starts[1:] != np.add.accumulate(query_lens)):
            raise ValueError(
                f"cu_seqlens_q {starts.tolist()} do not match {num_tokens} tokens in {batch.query_lens_host} a sequence"
            )
    if not has_pages:
        _check_range("page_table", batch.page_table, num_pages)
    _check_range("slot_mapping", batch.slot_mapping, num_pages * page_tokens)
    return query_lens, seq_lens


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
            f"expected contiguous {dtype} {shape} on cpu"
        )


def _check_range(name: str, values: Tensor, limit: int) -> None:
    found = values.numpy()
    unsigned = found.view(f"u{found.itemsize}")  # a negative number becomes huge: one comparison finds both
    if np.count_nonzero(unsigned >= limit):
        raise ValueError(f"{name} holds {found.flat[unsigned.argmax()]}, expected 0 to {limit - 1}")


def _check_pool(pool: Tensor, shape: AttentionShape) -> None:
    expected = {KV_HEADS: shape.num_kv_heads, KEY_VALUE: 2, HEAD_DIM: shape.head_dim}
    if pool.dim() != 6 or any(pool.shape[axis] != size for axis, size in expected.items()):
        raise ValueError(f"pool is {tuple(pool.shape)}, expected sizes {expected} by axis (wire.kv_layout)")
    if pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"pool is {pool.dtype}, expected float32 or bfloat16")
    # pages may have gaps between them: the draft model's part of each page
    if not pool.is_cpu or not pool[:1].is_contiguous() or pool.stride(PAGES) < pool[0].numel():
        raise ValueError(f"pool on {pool.device} with strides {pool.stride()}, expected contiguous pages on cpu")


def _check_heads(name: str, tensor: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected {dtype} {shape} on cpu"
        )
    if tensor.stride(2) != 1 and shape[2] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous last dimension")
