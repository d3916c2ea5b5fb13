"""The processes that compute one model together, a shard each: what they exchange within a step.

Every rank runs the same steps in the same order, so each call here meets the same call of the others. Knows tensors and
the group, nothing of models or of how ranks learn of steps.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """One rank's view of its group."""

    rank: int
    size: int

    def add_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the sum over all ranks; returns it. All ranks get the same bits."""
        ...

    def join(self, tensor: Tensor) -> Tensor:
        """[S, n], as many rows and columns on each rank |-> [S, size * n], columns of rank 0 first."""
        ...


class OneRank:
    """A model that is not divided."""

    rank, size = 0, 1

    def add_(self, tensor: Tensor) -> Tensor:
        """See `Ranks.add_`."""
        return tensor

    def join(self, tensor: Tensor) -> Tensor:
        """See `Ranks.join`."""
        return tensor


class GroupRanks:
    """A group of torch.distributed: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def add_(self, tensor: Tensor) -> Tensor:
        """See `Ranks.add_`."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def join(self, tensor: Tensor) -> Tensor:
        """See `Ranks.join`."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, -1)
