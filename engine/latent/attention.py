"""Latent attention: how a layer makes queries and a token's KV, and two ways to attend to it, with one result.

    expanded: kv_b_proj makes each head's keys and values of all latents: few products a query, many a context
    absorbed: each query goes through the keys' half of kv_b_proj and what it attended through the values' half, so
              latents are one key and value for all heads: no product a context, three times as much a pair

Each sequence of a step takes the way that costs less. Long contexts are expanded CHUNK_TOKENS at a time.

T: new tokens, Hq: query heads, N + R: of an expanded key, V: of its value, K + R: of a token's KV (`Latents`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV, rotate
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import narrow
from engine.batch import Batch
from engine.latent.families import Latents
from engine.layers.linear import Linear
from engine.models.assemble import LayerBuilder
from engine.ops.base import Ops

NORM_EPS = 1e-6  # of a latent's norm, whatever the model's
CHUNK_TOKENS = 1024  # of a context that are expanded at once: 84 MB of DeepSeek V3 on one rank, bfloat16
Bools = NDArray[np.bool_]


class Costs(NamedTuple):
    """Of a multiplication in each kind of work, relative to a plain product's."""

    expanded: float = 1.0
    absorbed: float = 1.0


COSTS = Costs()


@dataclass(frozen=True, slots=True, eq=False)
class LatentProjection:
    """See `Projection`. Its queries are [T, Hq, N + R], not absorbed; its values are what pages keep: [T, 1, K + R]."""

    latents: Latents
    kv_b_proj: Tensor  # [Hq, N + V, K]
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
        return QKV(query, kept[:, None], weights=self.kv_b_proj)


def build_projection(builder: LayerBuilder) -> LatentProjection:
    """This rank's part of a layer."""
    own, config = builder.config.token_kv, builder.config
    assert isinstance(own, Latents)
    weight = builder.format.reader.fuse(builder.table.products["kv_b_proj"])
    return LatentProjection(
        own,
        weight.view(config.num_heads, -1, own.rank),
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
        self, shape: AttentionShape, absorbed: AttentionBackend, costs: Costs = COSTS, *, may_expand: bool = True
    ) -> None:
        """absorbed: of the same shape, which attends to what pages have as to one head."""
        self._shape, self._absorbed, self._costs, self._may_expand = shape, absorbed, costs, may_expand
        self.name = absorbed.name
        self.is_capturable = absorbed.is_capturable

    def plan(self, pool: Tensor, batch: Batch) -> None:
        lens, contexts = batch.query_lens_host, batch.seq_lens_host
        is_expanded = choose_expanded(lens, contexts, self._shape, self._costs) & self._may_expand
        self._pool, self._batch = pool, batch
        self._expanded: Sequence[int] = np.flatnonzero(is_expanded).tolist()  # sequences
        self._rows: Tensor | None = None  # [n] of the others among T; None: all
        if self._expanded:
            device = batch.slot_mapping.device
            self._rows = torch.from_numpy(np.flatnonzero(~np.repeat(is_expanded, lens))).to(device)
            batch = select_sequences(batch, np.flatnonzero(~is_expanded), self._rows)
        if len(batch.query_lens_host):
            self._absorbed.plan(pool, batch)

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "LatentAttention":
        backend = self._absorbed.for_graph(num_sequences, num_tokens, num_pages)
        return LatentAttention(self._shape, backend, self._costs, may_expand=False)

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        rows = self._rows
        if rows is None:
            return self._absorb(layer, heads)
        out = heads.query_key.new_empty(*heads.query_key.shape[:2], self._shape.expanded[1])
        if len(rows):
            own = heads._replace(query_key=heads.query_key[rows], value=heads.value[rows])
            out[rows] = self._absorb(layer, own)
        ends = self._batch.query_lens_host.cumsum()
        for sequence in self._expanded:
            count, end = int(self._batch.query_lens_host[sequence]), int(ends[sequence])
            new = slice(end - count, end)
            own = heads._replace(query_key=heads.query_key[new], value=heads.value[new])
            out[new] = self._expand(layer, own, sequence, self._batch.slot_mapping[new])
        return out

    def _absorb(self, layer: int, heads: QKV) -> Tensor:
        """Of sequences that the other backend has planned: [n, Hq, V]."""
        query, up, rank = heads.query_key, heads.weights, self._shape.value_dim  # up: [Hq, N + V, K]
        num_tokens, num_heads, _ = query.shape
        plain = up.shape[1] - self._shape.expanded[1]
        joined = query.new_empty(num_tokens, num_heads + 1, self._shape.head_dim)
        joined[:, :-1, :rank] = torch.bmm(query[..., :plain].transpose(0, 1), up[:, :plain]).transpose(0, 1)
        joined[:, :-1, rank:] = query[..., plain:]
        joined[:, -1:] = heads.value
        attended = self._absorbed.attend(layer, QKV(joined, heads.value), None)  # [n, Hq, K]
        return torch.bmm(attended.transpose(0, 1), up[:, plain:].transpose(1, 2)).transpose(0, 1).contiguous()

    def _expand(self, layer: int, heads: QKV, sequence: int, slots: Tensor) -> Tensor:
        """Of one sequence, whose new tokens go to `slots` [L]: [L, Hq, V]."""
        pages = self._pool[:, 0, layer, 0]  # [num_pages, page_tokens, K + R]
        page_tokens, num_new = pages.shape[1], len(slots)
        pages[slots // page_tokens, slots % page_tokens] = narrow(heads.value[:, 0], pages.dtype)
        query, table = heads.query_key.transpose(0, 1), self._batch.page_table[sequence]  # [Hq, L, N + R]
        total = Attended.nothing(query, self._shape.expanded[1])
        end = int(self._batch.seq_lens_host[sequence])
        first = end - num_new
        for begin in (*range(0, first, CHUNK_TOKENS), *range(first, end, CHUNK_TOKENS)):
            stop = min(begin + CHUNK_TOKENS, first if begin < first else end)
            from_page = begin // page_tokens
            found = pages.index_select(0, table[from_page : -(-stop // page_tokens)]).flatten(0, 1)
            kept = found[begin - from_page * page_tokens :][: stop - begin].to(query.dtype)  # [n, K + R]
            keys, values = expand(kept, heads.weights, self._shape)
            if begin < first:
                total.add_(slice(0, num_new), attend_part(query, keys, values, self._shape.scale))
                continue
            own, later = slice(begin - first, stop - first), slice(stop - first, num_new)
            total.add_(own, attend_part(query[:, own], keys, values, self._shape.scale, is_causal=True))
            if stop < end:
                total.add_(later, attend_part(query[:, later], keys, values, self._shape.scale))
        return total.output.transpose(0, 1).to(query.dtype)


def expand(kept: Tensor, kv_b_proj: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """[n, K + R], [Hq, N + V, K] |-> keys [Hq, n, N + R] and values [Hq, n, V]."""
    num_heads, _, rank = kv_b_proj.shape
    key_dim, value_dim = shape.expanded
    both = functional.linear(kept[:, :rank], kv_b_proj.flatten(0, 1)).view(len(kept), num_heads, -1)  # [n, Hq, N + V]
    keys = both.new_empty(len(kept), num_heads, key_dim)
    plain = both.shape[2] - value_dim
    keys[..., :plain] = both[..., :plain]
    keys[..., plain:] = kept[:, None, rank:]
    return keys.transpose(0, 1), both[..., plain:].transpose(0, 1)


class Attended(NamedTuple):
    """What queries have attended to some keys."""

    output: Tensor  # [Hq, L, V] float32
    weight: Tensor  # [Hq, L] float32, the logarithm of the softmax's denominator

    @staticmethod
    def nothing(query: Tensor, value_dim: int) -> "Attended":
        """query: [Hq, L, ...]"""
        output = torch.zeros(*query.shape[:2], value_dim, dtype=torch.float32, device=query.device)
        return Attended(output, torch.full_like(output[..., 0], -torch.inf))

    def add_(self, rows: slice, part: "Attended") -> None:
        """What some of the queries attended to other keys."""
        output, weight = self.output[:, rows], self.weight[:, rows]
        joined = torch.logaddexp(weight, part.weight)
        output.mul_((weight - joined).exp_()[..., None]).add_(part.output * (part.weight - joined).exp_()[..., None])
        weight.copy_(joined)


def attend_part(query: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool = False) -> Attended:
    """[Hq, L, D], [Hq, n, D], [Hq, n, V]. is_causal: query i sees keys up to i; else all."""
    value_dim = values.shape[-1]
    if query.is_cpu and query.dtype is not torch.float16:  # a kernel whose heads all have one size
        width = max(value_dim, query.shape[-1])
        padded = [functional.pad(one, (0, width - one.shape[-1]))[None] for one in (query, keys, values)]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*padded, 0.0, is_causal, scale=scale)
        return Attended(found[0][0, ..., :value_dim], found[1][0])
    return attend_slowly(query, keys, values, scale, is_causal=is_causal)


def attend_slowly(query: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool) -> Attended:
    """`attend_part` on any device."""
    scores = query.float() @ keys.float().transpose(1, 2) * scale  # [Hq, L, n]
    if is_causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    return Attended(scores.softmax(-1) @ values.float(), scores.logsumexp(-1))


def select_sequences(batch: Batch, which: NDArray[np.int64], rows: Tensor) -> Batch:
    """What attention is told of some sequences of a batch; rows: [n] their new tokens."""
    lens, device = batch.query_lens_host[which], rows.device
    starts = np.concatenate(([0], lens.cumsum())).astype(np.int32)
    index = torch.from_numpy(which).to(device)
    return replace(
        batch, token_ids=batch.token_ids[rows], positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows], cu_seqlens_q=torch.from_numpy(starts).to(device),
        seq_lens=batch.seq_lens[index], page_table=batch.page_table[index], query_lens_host=lens,
        seq_lens_host=batch.seq_lens_host[which],
    )  # fmt: skip
