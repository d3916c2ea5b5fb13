"""Token ids to hidden rows. Knows how the table lies in memory, and which of its rows are here."""

import torch
from torch import Tensor
from torch.nn import functional

from engine.ranks import Ranks


class Embedding:
    """A whole table."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        """weight: [V, H]"""
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 |-> [T, H]"""
        return functional.embedding(token_ids, self.weight)


class SummedEmbedding(Embedding):
    """A table of which each rank has some rows: the others give zeros, and all are added."""

    __slots__ = ("_first", "_ranks")

    def __init__(self, weight: Tensor, first: int, ranks: Ranks) -> None:
        """weight: [n, H], of the tokens from `first` on."""
        super().__init__(weight)
        self._first = first
        self._ranks = ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 |-> [T, H]"""
        own = token_ids - self._first
        is_here = (own >= 0) & (own < len(self.weight))
        rows = super().__call__(torch.where(is_here, own, 0))
        return self._ranks.add_(rows.mul_(is_here[:, None]))
