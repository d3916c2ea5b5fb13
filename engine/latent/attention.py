"""Latent attention: how a layer makes queries and a token's KV, and two ways to attend to it, with one result.

    expanded: kv_b_proj makes each head's keys and values of all latents: few products a query, many a context
    absorbed: each query goes through the keys' half of kv_b_proj and what it attended through the values' half, so
              latents are one key and value for all heads: no product a context, three times as much a pair

Each sequence of a step takes the way that costs less. How latents become heads: expand.py.

T: new tokens, Hq: query heads, N + R: of an expanded key, V: of its value, K + R: of a token's KV (`Latents`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV, rotate
from engine.attention.shape import AttentionShape
from engine.batch import Batch
from engine.latent.config import Latents
from engine.latent.expand import Expansion, Up
from engine.layers.linear import Linear
from engine.models.assemble import LayerBuilder
from engine.ops.base import Ops, widen_slow
from engine.staging import find_starts, upload

NORM_EPS = 1e-6  # of a latent's norm, whatever the model's
Bools = NDArray[np.bool_]


class Costs(NamedTuple):
    """Costs of a multiplication in each kind of work, relative to expanding's own. Measured with AMX, the heads of
    DeepSeek V2-Lite and a context of 8k: from 233 new tokens on, expanding takes less time."""

    expanded: float = 1.2
    absorbed: float = 0.87


COSTS = Costs()


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


def keep_bound(is_expanded: Bools, seq_lens: NDArray[np.int32], most_tokens: int) -> Bools:
    """[B]: the first of those sequences whose contexts have at most so many tokens together. Pure."""
    wanted = np.where(is_expanded, seq_lens, 0).astype(np.int64)
    return is_expanded & (wanted.cumsum() <= most_tokens)


class LatentAttention:
    """An `AttentionBackend`. Its heads are those of `LatentProjection`; it returns [T, Hq, V]."""

    def __init__(
        self, shape: AttentionShape, absorbed: AttentionBackend, expansion: Expansion | None, costs: Costs = COSTS
    ) -> None:
        """absorbed: of the same shape, which attends to what pages have as to one head. expansion: None: never."""
        self._shape, self._absorbed, self._expansion, self._costs = shape, absorbed, expansion, costs
        self.name = absorbed.name
        self.is_capturable = absorbed.is_capturable
        self._has_loaded = expansion is None
        self._rows: tuple[Tensor, Tensor] | None = None  # [n] expanded and absorbed ones among T; None: none, all

    def plan(self, pool: Tensor, batch: Batch) -> None:
        self._rows = None
        if not self._has_loaded:  # a plan may compile its kernels: the first prompt waits for it, not the first answer
            self._has_loaded = True
            self._absorbed.plan(pool, batch)
        if self._expansion is not None:
            lens = batch.query_lens_host, batch.seq_lens_host
            is_expanded = choose_expanded(*lens, self._shape, self._costs)
            is_expanded = keep_bound(is_expanded, lens[1], self._expansion.most_tokens)
            if is_expanded.any():
                part, rows = select_sequences(batch, is_expanded)
                self._expansion.plan(pool, part)
                batch, others = select_sequences(batch, ~is_expanded)
                self._rows = rows, others
        if len(batch.query_lens_host):
            self._absorbed.plan(pool, batch)

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "LatentAttention":
        backend = self._absorbed.for_graph(num_sequences, num_tokens, num_pages)
        return LatentAttention(self._shape, backend, None)

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        if self._rows is None or self._expansion is None:
            return self._absorb(layer, heads)
        out = heads.query_key.new_empty(*heads.query_key.shape[:2], self._shape.expanded[1])
        for own, attend in zip(self._rows, (self._expansion.attend, self._absorb), strict=True):
            if len(own):
                out[own] = attend(layer, heads._replace(query_key=heads.query_key[own], value=heads.value[own]))
        return out

    def _absorb(self, layer: int, heads: QKV) -> Tensor:
        """Attention of the sequences that the other backend has planned: [n, Hq, V]."""
        query, up, rank = heads.query_key, heads.weights, self._shape.value_dim
        assert isinstance(up, Up)
        (num_tokens, num_heads, _), plain = query.shape, up.keys.shape[1]
        joined = query.new_empty(num_tokens, num_heads + 1, self._shape.head_dim)
        plain_query = widen_slow(query[..., :plain].transpose(0, 1))
        joined[:, :-1, :rank] = torch.bmm(plain_query, widen_slow(up.keys)).transpose(0, 1)
        joined[:, :-1, rank:] = query[..., plain:]
        joined[:, -1:] = heads.value
        attended = self._absorbed.attend(layer, QKV(joined, heads.value), None)  # [n, Hq, K]
        values = widen_slow(up.values).transpose(1, 2)
        return torch.bmm(widen_slow(attended.transpose(0, 1)), values).transpose(0, 1).to(query.dtype).contiguous()


def select_sequences(batch: Batch, is_wanted: Bools) -> tuple[Batch, Tensor]:
    """The batch of some sequences alone, for attention, and their new tokens among T, [n] int64."""
    lens = batch.query_lens_host[is_wanted]
    found = np.flatnonzero(np.repeat(is_wanted, batch.query_lens_host)), np.flatnonzero(is_wanted)
    rows, which, starts = upload([*found, find_starts(lens.astype(np.int64))], batch.slot_mapping.device)
    part = replace(
        batch, token_ids=batch.token_ids[rows], positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows], cu_seqlens_q=starts,
        seq_lens=batch.seq_lens[which], page_table=batch.page_table[which], query_lens_host=lens,
        seq_lens_host=batch.seq_lens_host[is_wanted],
    )  # fmt: skip
    return part, rows
