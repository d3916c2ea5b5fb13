"""Attention by the C++ kernel in cpu_paged.cpp: reads pages where they lie, uses torch's thread count.

Checks everything the kernel takes on trust: the batch once, each layer's tensors at every call. Knows no compiler.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionShape
from engine.batch import Batch

BLOCK_ROWS = 256  # query rows of a work item: packing a key tile is amortised over these; 64 KB of output at D=64
NO_WINDOW = 1 << 40  # wider than any context

_MATH_FLOAT32, _MATH_BFLOAT16, _MATH_BFLOAT16_AMX = 0, 1, 2  # the kernel's `math` argument


class _BatonBatch(ctypes.Structure):
    """struct BatonBatch of cpu_paged.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pool", "query_starts", "context_lens", "page_table")),
        *((name, ctypes.c_void_p) for name in ("write_pages", "write_offsets", "blocks")),
        *((name, ctypes.c_int64) for name in ("page_table_width", "num_tokens", "num_blocks", "block_tokens")),
        *((name, ctypes.c_int64) for name in ("page_elements", "num_heads", "num_kv_heads", "page_tokens", "head_dim")),
        ("scale", ctypes.c_float),
    ]


class _BatonLayer(ctypes.Structure):
    """struct BatonLayer of cpu_paged.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out")),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_token", "value_head", "layer", "window")),
    ]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checked batch in a checked pool. Holds both, so that an `is` comparison cannot meet a recycled id."""

    batch: Batch
    pool: Tensor
    blocks: Tensor  # [num_blocks, 2] int32, see plan_blocks
    arguments: _BatonBatch  # points into the three above


class CpuPagedAttention:
    """Owns the loaded kernel and what it prepared for the last batch. One caller at a time."""

    name = "cpu_paged"

    def __init__(self, shape: AttentionShape, kernel: ctypes.CDLL, *, use_amx: bool = True) -> None:
        """ValueError if the heads do not divide or the scale is not positive."""
        if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"num_heads {shape.num_heads} is no multiple of num_kv_heads {shape.num_kv_heads}")
        if not shape.scale > 0:
            raise ValueError(f"scale is {shape.scale}, expected > 0")
        self._shape = shape
        self._attend = kernel.baton_attend
        self._attend.restype = None
        self._attend.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self._has_amx = use_amx and bool(kernel.baton_request_amx())
        self._prepared: _Prepared | None = None

    @property
    def instructions(self) -> str:
        """What bfloat16 pages are multiplied with, for the log."""
        return "AMX" if self._has_amx else "float32 vectors"

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, pool: Tensor, batch: Batch, window: int | None
    ) -> Tensor:
        """See `AttentionBackend.attend`. ValueError names what does not fit; the pool is then untouched."""
        prepared = self._prepared
        if prepared is None or prepared.batch is not batch or prepared.pool is not pool:
            prepared = self._prepared = self._prepare(pool, batch)
        num_tokens = prepared.arguments.num_tokens
        shape = self._shape
        dtype = pool.dtype
        _check_heads("query", query, (num_tokens, shape.num_heads, shape.head_dim), dtype)
        _check_heads("key", key, (num_tokens, shape.num_kv_heads, shape.head_dim), dtype)
        _check_heads("value", value, (num_tokens, shape.num_kv_heads, shape.head_dim), dtype)
        if not 0 <= layer < pool.shape[1]:
            raise ValueError(f"layer {layer} is outside the pool's {pool.shape[1]} layers")
        if window is not None and window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
        out = torch.empty((num_tokens, shape.num_heads, shape.head_dim), dtype=dtype)
        arguments = _BatonLayer(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            layer,
            NO_WINDOW if window is None else window,
        )
        math = _MATH_FLOAT32 if dtype is torch.float32 else _MATH_BFLOAT16 + self._has_amx
        self._attend(ctypes.addressof(prepared.arguments), ctypes.addressof(arguments), math, torch.get_num_threads())
        return out

    def _prepare(self, pool: Tensor, batch: Batch) -> _Prepared:
        _check_pool(pool, self._shape)
        check_batch(batch, num_pages=pool.shape[0], page_tokens=pool.shape[4])
        block_tokens = max(1, BLOCK_ROWS * self._shape.num_kv_heads // self._shape.num_heads)
        blocks = torch.tensor(
            plan_blocks(batch.query_lens_host, batch.context_lens_host, block_tokens), dtype=torch.int32
        ).view(-1, 2)
        arguments = _BatonBatch(
            pool.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.page_table.data_ptr(),
            batch.write_pages.data_ptr(),
            batch.write_offsets.data_ptr(),
            blocks.data_ptr(),
            batch.page_table.shape[1],
            batch.token_ids.shape[0],
            blocks.shape[0],
            block_tokens,
            pool.stride(0),
            self._shape.num_heads,
            self._shape.num_kv_heads,
            pool.shape[4],
            self._shape.head_dim,
            self._shape.scale,
        )
        return _Prepared(batch, pool, blocks, arguments)


def plan_blocks(query_lens: Sequence[int], context_lens: Sequence[int], block_tokens: int) -> list[tuple[int, int]]:
    """(sequence, first of up to `block_tokens` new tokens) covering every new token, the longest contexts first.

    Threads take blocks in this order, so the last ones to finish are short.
    """
    blocks: list[tuple[int, int, int]] = []  # (keys seen by the block's last token, sequence, first)
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for first in range(0, query_len, block_tokens):
            blocks.append((context_len - query_len + min(first + block_tokens, query_len), sequence, first))
    blocks.sort(reverse=True)
    return [(sequence, first) for _, sequence, first in blocks]


def check_batch(batch: Batch, *, num_pages: int, page_tokens: int) -> None:
    """ValueError naming the first value of `batch` that would reach outside a pool of that size."""
    num_tokens, num_sequences = batch.token_ids.shape[0], len(batch.query_lens_host)
    width = batch.page_table.shape[-1]
    for name, tensor, shape, dtype in (
        ("query_starts", batch.query_starts, (num_sequences + 1,), torch.int32),
        ("context_lens", batch.context_lens, (num_sequences,), torch.int32),
        ("page_table", batch.page_table, (num_sequences, width), torch.int32),
        ("write_pages", batch.write_pages, (num_tokens,), torch.int64),
        ("write_offsets", batch.write_offsets, (num_tokens,), torch.int64),
    ):
        if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
                f"expected contiguous {dtype} {shape} on cpu"
            )
    if batch.context_lens.tolist() != list(batch.context_lens_host):
        raise ValueError(f"context_lens {batch.context_lens.tolist()} differ from the host's {batch.context_lens_host}")
    starts = [0]
    for query_len, context_len in zip(batch.query_lens_host, batch.context_lens_host, strict=True):
        if not 0 <= query_len <= context_len:
            raise ValueError(f"{query_len} new tokens in a context of {context_len}")
        if context_len > width * page_tokens:
            raise ValueError(f"context of {context_len} tokens in a page table of {width} pages of {page_tokens}")
        starts.append(starts[-1] + query_len)
    if batch.query_starts.tolist() != starts or starts[-1] != num_tokens:
        raise ValueError(f"query_starts {batch.query_starts.tolist()} do not match {num_tokens} tokens in {starts}")
    _check_range("page_table", batch.page_table, num_pages)
    _check_range("write_pages", batch.write_pages, num_pages)
    _check_range("write_offsets", batch.write_offsets, page_tokens)


def _check_range(name: str, values: Tensor, limit: int) -> None:
    if values.numel():
        low, high = (int(bound) for bound in values.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} holds {low if low < 0 else high}, expected 0 to {limit - 1}")


def _check_pool(pool: Tensor, shape: AttentionShape) -> None:
    expected = (shape.num_kv_heads, shape.head_dim)
    if pool.dim() != 6 or pool.shape[2] != 2 or (pool.shape[3], pool.shape[5]) != expected:
        raise ValueError(
            f"pool is {tuple(pool.shape)}, expected [pages, layers, 2, {expected[0]}, page_tokens, {expected[1]}]"
        )
    if pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"pool is {pool.dtype}, expected float32 or bfloat16")
    # from page to page there may be a gap: memory that belongs to a draft model's part of the page
    if not pool.is_cpu or not pool[:1].is_contiguous() or pool.stride(0) < pool[0].numel():
        raise ValueError(f"pool on {pool.device} with strides {pool.stride()}, expected contiguous pages on cpu")


def _check_heads(name: str, tensor: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected {dtype} {shape} on cpu"
        )
    if tensor.stride(2) != 1 and shape[2] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous last dimension")
