"""Attention of models whose layers differ in their heads: one backend for all layers that are alike."""

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.batch import Batch


def as_is(head_dim: int) -> int:
    """The dims of a head in pages that are not padded."""
    return head_dim


class LayeredAttention:
    """An `AttentionBackend` over pages of several parts: its pool is [num_pages, elements]."""

    def __init__(
        self, shapes: Sequence[AttentionShape], backends: Sequence[AttentionBackend], page_tokens: int,
        pad_head: Callable[[int], int] = as_is,
    ) -> None:  # fmt: skip
        """shapes: of each layer; backends: for each distinct shape, in the order of their first layers.

        pad_head: see `Device`.
        """
        self._shapes, self._backends, self._page_tokens = list(shapes), list(backends), page_tokens
        self._pad_head = pad_head
        self._distinct = list(dict.fromkeys(shapes))
        parts = [self._distinct.index(shape) for shape in shapes]
        self._places = [(part, parts[:layer].count(part)) for layer, part in enumerate(parts)]  # layer |-> part, index
        self.name = backends[0].name
        self.is_capturable = all(backend.is_capturable for backend in backends)
        self._pool: Tensor | None = None
        self._views: list[Tensor] = []  # of each part of `_pool`

    def plan(self, pool: Tensor, batch: Batch) -> None:
        if pool is not self._pool:
            self._pool, self._views = pool, self._split(pool)
        for backend, pages in zip(self._backends, self._views, strict=True):
            backend.plan(pages, batch)

    def _split(self, pool: Tensor) -> list[Tensor]:
        views, begin = [], 0
        for shape in self._distinct:
            part = shape.part(self._shapes.count(shape))._replace(head_dim=self._pad_head(shape.head_dim))
            sizes = part.pool_sizes(len(pool), self._page_tokens)
            end = begin + prod(sizes[1:])
            views.append(pool[:, begin:end].view(sizes))
            begin = end
        return views

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "LayeredAttention":
        backends = [backend.for_graph(num_sequences, num_tokens, num_pages) for backend in self._backends]
        return LayeredAttention(self._shapes, backends, self._page_tokens, self._pad_head)

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        part, index = self._places[layer]
        return self._backends[part].attend(index, heads, window, sinks)
