"""Token ids to hidden rows."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A whole table."""

    weight: Tensor  # [V, H]

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


@dataclass(frozen=True, slots=True, eq=False)
class SummedEmbedding(Embedding):
    """A table divided over ranks by rows: each rank contributes zeros for rows it lacks, and the results are added."""

    own: Embedding  # the rows of the tokens from `first` on
    first: int
    ranks: Ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        own = token_ids - self.first
        is_here = (own >= 0) & (own < len(self.own))
        rows = self.own(torch.where(is_here, own, 0))
        return self.ranks.all_reduce_(rows.mul_(is_here[:, None]))
