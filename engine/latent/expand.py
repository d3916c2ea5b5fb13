"""Latents as heads with keys and values of their own, which kv_b_proj makes of them, in scratch memory.

A few heads at a time for a step's whole contexts, and of these some tokens at a time, so that memory has a bound:
`most_tokens` of all contexts of a step; what is beyond is absorbed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import narrow
from engine.batch import Batch
from engine.ops.base import widen_slow
from engine.staging import Ints, join_ranges, upload
from wire.kv_layout import TOKENS, KvPart

# Of expanded heads at once, and at least one: of DeepSeek V3's one of 20k tokens. 100 MB take a CPU twice as long, out
# of its caches.
SCRATCH_BYTES = 16 << 20
MOST_BYTES = 128 << 20  # of one head
BuildBackend = Callable[[AttentionShape], AttentionBackend]


class Up(NamedTuple):
    """kv_b_proj: from a latent to heads. Both halves are contiguous: products of few rows take a fourth of the time."""

    keys: Tensor  # [Hq, N, K]
    values: Tensor  # [Hq, V, K]


class Expansion(Protocol):
    """Attends to the heads of some sequences' contexts."""

    most_tokens: int  # of all contexts of a step together

    def plan(self, pool: Tensor, batch: Batch) -> None:
        """See `AttentionBackend`."""
        ...

    def attend(self, layer: int, heads: QKV) -> Tensor:
        """Attend for the planned sequences' n new tokens, from `LatentProjection`: [n, Hq, V]. Writes their KV."""
        ...


@runtime_checkable
class HeadsAttention(Protocol):
    """Attention without pages, which some devices have: to heads that lie one token after the other."""

    head_dims: tuple[int, int]  # of keys and values, which zeros follow
    scratch_bytes: int  # of expanded heads

    def plan_heads(self, num_heads: int, query_lens: Ints, context_lens: Ints) -> None:
        """For the next step; [B] each, on the host."""
        ...

    def attend_heads(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[n, H, Dk], [C, H, Dk], [C, H, Dv] |-> [n, H, Dv]: a sequence's queries are the last of its context."""
        ...


class PagedExpansion:
    """An `Expansion` into pages of its own, which any backend reads."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, build_backend: BuildBackend, pad_head: Callable[[int], int]
    ) -> None:
        """dtype: of queries. build_backend: for such heads. pad_head: see `Device`."""
        self._shape, self._dtype, self._build_backend = shape, dtype, build_backend
        self._head_dim = pad_head(max(shape.expanded))
        self.most_tokens = MOST_BYTES // (2 * self._head_dim * dtype.itemsize)
        self._backends: dict[int, AttentionBackend] = {}  # by number of heads
        self._scratch = torch.empty(0, dtype=dtype)

    def plan(self, pool: Tensor, batch: Batch) -> None:
        """Contexts get pages one after the other, of as many heads as fit."""
        page_tokens, device, dim = pool.shape[TOKENS], batch.slot_mapping.device, self._head_dim
        self._pool, self._slots = pool, batch.slot_mapping
        counts = torch.from_numpy(-(-batch.seq_lens_host.astype(np.int64) // page_tokens)).to(device)
        column = torch.arange(batch.page_table.shape[1], device=device)
        self._pages = batch.page_table[column < counts[:, None]]  # [M]
        num_pages = len(self._pages)
        head_bytes = 2 * num_pages * page_tokens * dim * self._dtype.itemsize
        num_heads = choose_num_heads(self._shape.num_heads, head_bytes, SCRATCH_BYTES)
        sizes = KvPart(1, num_heads, dim).pool_sizes(num_pages, page_tokens)
        if self._scratch.numel() < prod(sizes):
            self._scratch = torch.zeros(prod(sizes), dtype=self._dtype, device=device)
        self._heads = self._scratch[: prod(sizes)].view(sizes)
        table = ((counts.cumsum(0) - counts)[:, None] + column).clamp_(max=num_pages - 1).int()
        if num_heads not in self._backends:
            shape = AttentionShape(num_heads, num_heads, dim, self._shape.scale)
            self._backends[num_heads] = self._build_backend(shape)
        self._backend = self._backends[num_heads]
        own = replace(batch, page_table=table, slot_mapping=torch.zeros_like(batch.slot_mapping))
        self._backend.plan(self._heads, own)

    def attend(self, layer: int, heads: QKV) -> Tensor:
        query, (key_dim, value_dim) = heads.query_key, self._shape.expanded
        of_layer = self._pool[:, 0, layer, 0, :, : self._shape.head_dim]  # [num_pages, page_tokens, K + R]
        _write(of_layer, self._slots, heads.value[:, 0])
        page_tokens = of_layer.shape[1]
        keys, values = self._heads[:, :, 0].transpose(1, 3).unbind(2)  # [M, page_tokens, heads, D] each
        query = functional.pad(query, (0, keys.shape[-1] - key_dim))
        out = query.new_empty(*query.shape[:2], value_dim)
        num_heads = keys.shape[2]
        step = max(1, choose_num_tokens(self._shape, self._dtype, num_heads, SCRATCH_BYTES) // page_tokens)
        for own in _groups(query.shape[1], num_heads):
            for begin in range(0, len(self._pages), step):
                some = slice(begin, begin + step)
                kept = of_layer.index_select(0, self._pages[some]).to(query.dtype)  # [m, page_tokens, K + R]
                _expand(kept, heads.weights, own, keys[some], values[some])
            out[:, own] = self._backend.attend(0, QKV(query[:, own], query[:, :0]), None)[..., :value_dim]
        return out


class RaggedExpansion:
    """An `Expansion` for a device with `HeadsAttention`. Waits for nothing; its memory is the same for all steps."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, attention: HeadsAttention) -> None:
        self._shape, self._dtype, self._attention = shape, dtype, attention
        self.most_tokens = attention.scratch_bytes // (sum(attention.head_dims) * dtype.itemsize)
        self._scratch = torch.empty(0, dtype=dtype)

    def plan(self, pool: Tensor, batch: Batch) -> None:
        self._pool, self._slots = pool, batch.slot_mapping
        lens = batch.seq_lens_host.astype(np.int64)
        owners, places = join_ranges(np.zeros_like(lens), lens)
        owners_here, places_here = upload([owners, places], batch.slot_mapping.device)  # [C] each
        page_tokens, (key_dim, value_dim) = pool.shape[TOKENS], self._attention.head_dims
        self._where = batch.page_table[owners_here, places_here // page_tokens], places_here % page_tokens
        num_tokens, dims = len(places), key_dim + value_dim
        most_bytes = self._attention.scratch_bytes
        num_heads = choose_num_heads(self._shape.num_heads, num_tokens * dims * self._dtype.itemsize, most_bytes)
        if not len(self._scratch):
            size = most_bytes // self._dtype.itemsize
            self._scratch = torch.empty(size, dtype=self._dtype, device=batch.slot_mapping.device)
        taken = num_tokens * num_heads
        sizes = [taken * key_dim, taken * value_dim, len(self._scratch) - taken * dims]
        keys, values, _ = torch.split(self._scratch, sizes)
        self._keys, self._values = keys.view(num_tokens, num_heads, -1), values.view(num_tokens, num_heads, -1)
        self._attention.plan_heads(num_heads, batch.query_lens_host.astype(np.int64), lens)

    def attend(self, layer: int, heads: QKV) -> Tensor:
        query, (pages, places) = heads.query_key, self._where
        of_layer = self._pool[:, 0, layer, 0, :, : self._shape.head_dim]  # [num_pages, page_tokens, K + R]
        _write(of_layer, self._slots, heads.value[:, 0])
        query = functional.pad(query, (0, self._keys.shape[-1] - query.shape[-1]))
        out = query.new_empty(*query.shape[:2], self._shape.expanded[1])
        num_heads, most_bytes = self._keys.shape[1], self._attention.scratch_bytes // 8
        step = choose_num_tokens(self._shape, self._dtype, num_heads, most_bytes)
        for own in _groups(query.shape[1], num_heads):
            for begin in range(0, len(pages), step):
                some = slice(begin, begin + step)
                kept = of_layer[pages[some], places[some]].to(query.dtype)  # [c, K + R]
                _expand(kept, heads.weights, own, self._keys[some], self._values[some])
            out[:, own] = self._attention.attend_heads(query[:, own], self._keys, self._values)[..., : out.shape[-1]]
        return out


def choose_num_heads(num_heads: int, head_bytes: int, most_bytes: int) -> int:
    """How many of the heads are expanded at once: as many as `most_bytes` hold, in equal groups; at least one."""
    divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
    return max(count for count in divisors if count == 1 or count * head_bytes <= most_bytes)


def choose_num_tokens(shape: AttentionShape, dtype: torch.dtype, num_heads: int, most_bytes: int) -> int:
    """How many latents are taken out of pages at once, twice, and multiplied: as many as `most_bytes` hold."""
    return max(1, most_bytes // (dtype.itemsize * (2 * shape.head_dim + num_heads * max(shape.expanded))))


def _groups(num_heads: int, at_once: int) -> Iterator[slice]:
    return (slice(first, first + at_once) for first in range(0, num_heads, at_once))


def _write(of_layer: Tensor, slots: Tensor, kept: Tensor) -> None:
    """of_layer: [num_pages, page_tokens, K + R], kept: [n, K + R]"""
    page_tokens = of_layer.shape[1]
    of_layer[slots // page_tokens, slots % page_tokens] = narrow(kept, of_layer.dtype)


def _expand(kept: Tensor, up: Up, own: slice, keys: Tensor, values: Tensor) -> None:
    """[..., K + R] |-> keys and values [..., heads, D] of some heads."""
    plain, rank, value_dim = up.keys.shape[1], up.keys.shape[2], up.values.shape[1]
    key_dim = plain + kept.shape[-1] - rank
    keys[..., plain:key_dim] = kept[..., None, rank:]
    keys[..., key_dim:] = 0
    latents = widen_slow(kept[..., :rank].contiguous())
    for half, into in ((up.keys, keys[..., :plain]), (up.values, values[..., :value_dim])):
        found = functional.linear(latents, widen_slow(half[own].flatten(0, 1)))  # [..., heads * (N or V)]
        into.copy_(found.view(into.shape))
