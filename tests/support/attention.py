"""A ragged batch over pages, its attention as a dense softmax, and a check of what was written."""

import shutil
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from tests.support.batches import Part, pack
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS, pool_sizes

CPU = torch.device("cpu")
HAS_COMPILER = any(shutil.which(name) for name in ("g++", "c++", "clang++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")


def of_layer(pool: Tensor, layer: int) -> Tensor:
    """[2, num_pages, Hkv, page_tokens, D]: keys, values; a view."""
    return pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)[layer]


def draw(*sizes: int) -> Tensor:
    """Random numbers, for the same sizes the same."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


class Problem:
    """A ragged batch over a pool with shuffled pages: one sequence for each (query_len, context_len)."""

    def __init__(
        self, lens: Sequence[tuple[int, int]], heads: tuple[int, int] = (6, 2), head_dim: int = 64,
        page_tokens: int = 16, dtype: torch.dtype = torch.float32, value_dim: int = 0,
    ) -> None:  # fmt: skip
        """value_dim: see `AttentionShape`."""
        generator = torch.Generator().manual_seed(0)
        num_heads, num_kv_heads = heads
        self.lens = lens
        self.shape = AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, value_dim=value_dim)
        self.sinks: Tensor | None = None
        counts = [-(-context // page_tokens) for _, context in lens]
        order = iter(torch.randperm(sum(counts) + 3, generator=generator).tolist())
        self.pages = [[next(order) for _ in range(count)] for count in counts]
        parts = [
            Part([1] * query, context - query, pages, num_logits=1)
            for (query, context), pages in zip(lens, self.pages, strict=True)
        ]
        self.batch = pack(parts, page_tokens, CPU)
        sizes = pool_sizes(
            num_pages=sum(counts) + 3, num_kv_heads=num_kv_heads, num_layers=2, page_tokens=page_tokens,
            head_dim=head_dim, has_values=not value_dim,
        )  # fmt: skip
        self.pool = torch.randn(sizes, generator=generator).to(dtype)
        num_tokens = sum(query for query, _ in lens)
        # Strided views of one projection, as the decoder hands them over.
        fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
        self.query, self.key, self.value = torch.split(fused, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if value_dim:
            self.value = self.key

    @property
    def heads(self) -> QKV:
        return QKV(torch.cat((self.query, self.key), 1), self.value)

    def run(self, backend: AttentionBackend, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Attention at layer 1 -> ([T, Hq, Dv], the pool afterwards)."""
        pool = self.pool.clone()
        backend.plan(pool, self.batch)
        return backend.attend(1, self.heads, window, self.sinks), pool

    def truth(self, window: int | None) -> Tensor:
        """[T, Hq, Dv] float64: a dense softmax over tokens that are put in order one at a time."""
        page_tokens, pages_of_layer = self.pool.shape[TOKENS], of_layer(self.pool, 1)
        group = self.shape.num_heads // self.shape.num_kv_heads
        rows: list[Tensor] = []
        begin = 0
        for (query_len, context_len), pages in zip(self.lens, self.pages, strict=True):
            past = range(context_len - query_len)
            cached = [pages_of_layer[:, pages[p // page_tokens], :, p % page_tokens] for p in past]  # [2, Hkv, D] each
            kinds = [self.key] if self.shape.value_dim else [self.key, self.value]
            new = torch.stack(kinds, 1)[begin : begin + query_len]
            kept = torch.cat([*(one[None] for one in cached), new]).double()  # [C, 2 or 1, Hkv, D]
            keys, values = kept[:, 0].repeat_interleave(group, 1), kept[:, -1].repeat_interleave(group, 1)
            values = values[..., : self.shape.value_dim or None]
            queries = self.query[begin : begin + query_len].double()
            scores = torch.einsum("qhd,chd->hqc", queries, keys) * self.shape.scale
            if softcap := self.shape.softcap:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(context_len - query_len, context_len)[:, None]
            key_position = torch.arange(context_len)
            hidden = key_position > position
            if self.batch.ancestors is not None:
                new = key_position - (context_len - query_len)
                for row, bits in enumerate(self.batch.ancestors[begin : begin + query_len].tolist()):
                    hidden[row] |= torch.tensor([bits != 0 and n >= 0 and not bits >> n & 1 for n in new.tolist()])
            if window is not None:
                hidden |= key_position <= position - window
            weights = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                weights = torch.cat((weights, self.sinks.double().view(-1, 1, 1).expand(-1, query_len, 1)), -1)
            weights = weights.softmax(-1)[..., :context_len]
            rows.append(torch.einsum("hqc,chd->qhd", weights, values))
            begin += query_len
        return torch.cat(rows)


def check_writes(problem: Problem, pool: Tensor) -> None:
    """Only the named rows of layer 1 changed, and they hold the new keys and values."""
    expected, dim = problem.pool.clone(), problem.key.shape[-1]
    for token, slot in enumerate(problem.batch.slot_mapping.tolist()):
        page, row = divmod(slot, pool.shape[TOKENS])
        of_layer(expected, 1)[0, page, :, row, :dim] = problem.key[token]
        of_layer(expected, 1)[-1, page, :, row, :dim] = problem.value[token]
    assert torch.equal(pool, expected)
