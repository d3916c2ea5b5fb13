"""Token ids to hidden rows. Knows the table's memory layout, and which rows this rank has."""

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

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __len__(self) -> int:
        """Number of tokens that have a row here."""
        return len(self.weight)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 |-> [T, H]"""
        return functional.embedding(token_ids, self.weight)


class SummedEmbedding(Embedding):
    """A table divided over ranks by rows: each rank contributes zeros for rows it lacks, and the results are added."""

    __slots__ = ("_first", "_own", "_ranks")

    def __init__(self, own: Embedding, first: int, ranks: Ranks) -> None:
        """own: the rows of the tokens from `first` on."""
        super().__init__(own.weight)
        self._own = own
        self._first = first
        self._ranks = ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 |-> [T, H]"""
        own = token_ids - self._first
        is_here = (own >= 0) & (own < len(self._own))
        rows = self._own(torch.where(is_here, own, 0))
        return self._ranks.all_reduce_(rows.mul_(is_here[:, None]))
