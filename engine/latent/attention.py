"""Latent attention: how a layer makes queries and a token's KV, and two ways to attend to it, with one result.

    expanded: kv_b_proj makes each head's keys and values of all latents: few products a query, many a context
    absorbed: each query goes through the keys' half of kv_b_proj and what it attended through the values' half, so
              latents are one key and value for all heads: no product a context, three times as much a pair

Each sequence of a step takes the way that costs less. What is expanded lies in pages of its own, of as many heads at a
time as SCRATCH_BYTES hold, so that the same backends attend to it as to other models' heads.

T: new tokens, Hq: query heads, N + R: of an expanded key, V: of its value, K + R: of a token's KV (`Latents`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.attention.layered import as_is
from engine.attention.qkv import QKV, rotate
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import narrow
from engine.batch import Batch
from engine.latent.config import Latents
from engine.layers.linear import Linear
from engine.models.assemble import LayerBuilder
from engine.ops.base import Ops
from wire.kv_layout import KV_HEADS, TOKENS, KvPart

NORM_EPS = 1e-6  # of a latent's norm, whatever the model's
# Of a step's expanded heads at once, and at least one: of DeepSeek V3's one of 20k tokens. 100 MB take a CPU twice as
# long, out of its caches.
SCRATCH_BYTES = 16 << 20
Bools = NDArray[np.bool_]
BuildBackend = Callable[[AttentionShape], AttentionBackend]


class Costs(NamedTuple):
    """Of a multiplication in each kind of work, relative to expanding's own. Measured with AMX, the heads of DeepSeek
    V2-Lite and a context of 8k: from 233 new tokens on, expanding takes less time."""

    expanded: float = 1.2
    absorbed: float = 0.87


COSTS = Costs()


class Up(NamedTuple):
    """kv_b_proj: from a latent to heads. Both halves are contiguous: products of few rows take a fourth of the time."""

    keys: Tensor  # [Hq, N, K]
    values: Tensor  # [Hq, V, K]


@dataclass(frozen=True, slots=True, eq=False)
class LatentProjection:
    """See `Projection`. Its queries are [T, Hq, N + R], not absorbed; its values are what pages keep: [T, 1, K + R]."""

    latents: Latents
    up: Up
    kv_norm: Tensor  # [K]
    q_norm: Tensor | None  # [Q]
    q_b_proj: Linear | None  # Q -> Hq (N + R); None: the first product gives them
    ops: Ops

    def __call__(self, rows: Tensor, cos: Tensor, signed_sin: Tensor) -> QKV:
        """rows: [T, Q or Hq (N + R), then K + R]"""
        plain, rank, width = self.latents.plain_dim, self.latents.rank, self.latents.rank + self.latents.rotated_dim
        first, kept = rows[:, :-width], rows[:, -width:]
        if self.q_b_proj is not None and self.q_norm is not None:
            first = self.q_b_proj(self.ops.norm(first.contiguous(), self.q_norm, NORM_EPS))
        query = first.view(len(rows), -1, self.latents.key_dim)
        query[..., plain:] = rotate(query[..., plain:], cos, signed_sin)
        kept[:, :rank] = self.ops.norm(kept[:, :rank].contiguous(), self.kv_norm, NORM_EPS)
        kept[:, rank:] = rotate(kept[:, None, rank:], cos, signed_sin)[:, 0]
        return QKV(query, kept[:, None], weights=self.up)


def build_projection(builder: LayerBuilder) -> LatentProjection:
    """This rank's part of a layer."""
    own, config = builder.config.token_kv, builder.config
    assert isinstance(own, Latents)
    weight = builder.format.reader.fuse(builder.table.products["kv_b_proj"]).view(config.num_heads, -1, own.rank)
    keys, values = torch.split(weight, [own.plain_dim, own.value_dim], 1)
    return LatentProjection(
        own,
        Up(keys.contiguous(), values.contiguous()),
        builder.norm("kv_norm"),
        builder.optional_norm("q_norm"),
        builder.linear("q_b_proj") if own.query_rank else None,
        builder.format.ops,
    )


def choose_expanded(
    query_lens: NDArray[np.int32], seq_lens: NDArray[np.int32], shape: AttentionShape, costs: Costs
) -> Bools:
    """[B]: whether each sequence costs less expanded. Pure."""
    new, context = query_lens.astype(np.int64), seq_lens.astype(np.int64)
    pairs = new * context - new * (new - 1) // 2  # of a query and a key that it sees
    rotated, (key_dim, value_dim) = shape.head_dim - shape.value_dim, shape.expanded
    product = shape.value_dim * (key_dim - rotated + value_dim)  # of one token through kv_b_proj
    expanded = context * product + pairs * (key_dim + value_dim) * costs.expanded
    absorbed = new * product + pairs * (shape.head_dim + shape.value_dim) * costs.absorbed
    return expanded < absorbed


class LatentAttention:
    """An `AttentionBackend`. Its heads are those of `LatentProjection`; it returns [T, Hq, V]."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, absorbed: AttentionBackend, build_expanded: BuildBackend,
        costs: Costs = COSTS, *, may_expand: bool = True, pad_head: Callable[[int], int] = as_is,
    ) -> None:  # fmt: skip
        """dtype: of queries. absorbed: of the same shape, which attends to what pages have as to one head.

        build_expanded: for heads with keys and values of their own. pad_head: see `Device`.
        """
        self._shape, self._dtype, self._costs, self._may_expand = shape, dtype, costs, may_expand
        self._absorbed, self._build_expanded, self._pad_head = absorbed, build_expanded, pad_head
        self.name = absorbed.name
        self.is_capturable = absorbed.is_capturable
        self._expanding: Expansion | None = None  # of the last plan
        self._rows: Tensor | None = None  # [n] of the absorbed ones among T; None: all
        self._backends: dict[int, AttentionBackend] = {}  # by number of heads
        self._scratch = torch.empty(0, dtype=dtype)

    def plan(self, pool: Tensor, batch: Batch) -> None:
        costs = batch.query_lens_host, batch.seq_lens_host, self._shape, self._costs
        is_expanded = choose_expanded(*costs) & self._may_expand
        self._expanding, self._rows = None, None
        if is_expanded.any():
            self._expanding = self._plan_expanded(pool, *select_sequences(batch, is_expanded))
            batch, self._rows = select_sequences(batch, ~is_expanded)
        if len(batch.query_lens_host):
            self._absorbed.plan(pool, batch)

    def _plan_expanded(self, pool: Tensor, batch: Batch, rows: Tensor) -> "Expansion":
        """rows: [n] the batch's among T. Contexts get pages one after the other, of as many heads as fit."""
        page_tokens, shape = pool.shape[TOKENS], self._shape
        counts = torch.from_numpy(-(-batch.seq_lens_host.astype(np.int64) // page_tokens)).to(rows.device)
        column = torch.arange(batch.page_table.shape[1], device=rows.device)
        pages = batch.page_table[column < counts[:, None]]  # [M]
        num_pages, head_dim = len(pages), self._pad_head(max(shape.expanded))
        num_heads = choose_num_heads(shape.num_heads, 2 * num_pages * page_tokens * head_dim * self._dtype.itemsize)
        sizes = KvPart(1, num_heads, head_dim).pool_sizes(num_pages, page_tokens)
        if self._scratch.numel() < prod(sizes):
            self._scratch = torch.zeros(prod(sizes), dtype=self._dtype, device=rows.device)
        heads = self._scratch[: prod(sizes)].view(sizes)
        table = (counts.cumsum(0) - counts)[:, None] + column
        own = replace(
            batch, page_table=table.clamp_(max=num_pages - 1).int(), slot_mapping=torch.zeros_like(batch.slot_mapping)
        )
        if num_heads not in self._backends:
            own_shape = AttentionShape(num_heads, num_heads, head_dim, shape.scale)
            self._backends[num_heads] = self._build_expanded(own_shape)
        self._backends[num_heads].plan(heads, own)
        return Expansion(pool[..., : shape.head_dim], rows, batch.slot_mapping, pages, heads, self._backends[num_heads])

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "LatentAttention":
        backend = self._absorbed.for_graph(num_sequences, num_tokens, num_pages)
        return LatentAttention(
            self._shape, self._dtype, backend, self._build_expanded, self._costs, may_expand=False,
            pad_head=self._pad_head,
        )  # fmt: skip

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        expanding, rows = self._expanding, self._rows
        if expanding is None or rows is None:
            return self._absorb(layer, heads)
        out = heads.query_key.new_empty(*heads.query_key.shape[:2], self._shape.expanded[1])
        for own in (expanding.rows, rows):
            if len(own):
                new = heads._replace(query_key=heads.query_key[own], value=heads.value[own])
                is_absorbed = own is rows
                out[own] = self._absorb(layer, new) if is_absorbed else self._expand(layer, new, expanding)
        return out

    def _absorb(self, layer: int, heads: QKV) -> Tensor:
        """Of sequences that the other backend has planned: [n, Hq, V]."""
        query, up, rank = heads.query_key, heads.weights, self._shape.value_dim
        assert isinstance(up, Up)
        (num_tokens, num_heads, _), plain = query.shape, up.keys.shape[1]
        joined = query.new_empty(num_tokens, num_heads + 1, self._shape.head_dim)
        joined[:, :-1, :rank] = torch.bmm(query[..., :plain].transpose(0, 1), up.keys).transpose(0, 1)
        joined[:, :-1, rank:] = query[..., plain:]
        joined[:, -1:] = heads.value
        attended = self._absorbed.attend(layer, QKV(joined, heads.value), None)  # [n, Hq, K]
        return torch.bmm(attended.transpose(0, 1), up.values.transpose(1, 2)).transpose(0, 1).contiguous()

    def _expand(self, layer: int, heads: QKV, into: "Expansion") -> Tensor:
        """Of the sequences of `_plan_expanded`: [n, Hq, V]."""
        query, up, (key_dim, value_dim) = heads.query_key, heads.weights, self._shape.expanded
        assert isinstance(up, Up)
        plain, rank, num_heads = up.keys.shape[1], self._shape.value_dim, into.heads.shape[KV_HEADS]
        of_layer = into.pool[:, 0, layer, 0]  # [num_pages, page_tokens, K + R]
        page_tokens = of_layer.shape[1]
        slots = into.slots // page_tokens, into.slots % page_tokens
        of_layer[slots] = narrow(heads.value[:, 0], of_layer.dtype)
        kept = of_layer.index_select(0, into.pages).to(query.dtype)  # [M, page_tokens, K + R]
        keys, values = into.heads[:, :, 0].unbind(2)  # [M, heads, page_tokens, D] each
        keys[..., plain:key_dim] = kept[:, None, :, rank:]
        keys[..., key_dim:] = 0
        latents = kept[..., :rank].contiguous()
        query = functional.pad(query, (0, keys.shape[-1] - key_dim))
        out = query.new_empty(*query.shape[:2], value_dim)
        for first in range(0, query.shape[1], num_heads):
            own = slice(first, first + num_heads)
            for half, into_half in ((up.keys, keys[..., :plain]), (up.values, values[..., :value_dim])):
                found = functional.linear(latents, half[own].flatten(0, 1))  # [M, page_tokens, heads * (N or V)]
                into_half.copy_(found.view(*found.shape[:2], num_heads, -1).transpose(1, 2))
            new = QKV(query[:, own], query[:, :0])
            out[:, own] = into.backend.attend(0, new, None)[..., :value_dim]
        return out


class Expansion(NamedTuple):
    """A plan for the sequences of a step that are expanded, n new tokens in all."""

    pool: Tensor
    rows: Tensor  # [n] int64 among the step's T
    slots: Tensor  # [n] int64, where the KV of each goes
    pages: Tensor  # [M] of their contexts, one after the other
    heads: Tensor  # M pages of some heads' keys and values, a pool of one layer; each group of heads in turn
    backend: AttentionBackend  # has planned over them


def choose_num_heads(num_heads: int, head_bytes: int) -> int:
    """How many of the heads are expanded at once: as many as SCRATCH_BYTES hold, in equal groups; at least one."""
    divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
    return max(count for count in divisors if count == 1 or count * head_bytes <= SCRATCH_BYTES)


def select_sequences(batch: Batch, is_wanted: Bools) -> tuple[Batch, Tensor]:
    """What attention is told of some sequences of a batch, and their new tokens among T, [n] int64."""
    device, lens = batch.slot_mapping.device, batch.query_lens_host[is_wanted]
    rows = torch.from_numpy(np.flatnonzero(np.repeat(is_wanted, batch.query_lens_host))).to(device)
    starts = np.concatenate(([0], lens.cumsum())).astype(np.int32)
    which = torch.from_numpy(np.flatnonzero(is_wanted)).to(device)
    part = replace(
        batch, token_ids=batch.token_ids[rows], positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows], cu_seqlens_q=torch.from_numpy(starts).to(device),
        seq_lens=batch.seq_lens[which], page_table=batch.page_table[which], query_lens_host=lens,
        seq_lens_host=batch.seq_lens_host[is_wanted],
    )  # fmt: skip
    return part, rows
