"""The processes that compute one model together, one shard each: their exchanges within a step.

Every rank runs the same steps in the same order, so each call here meets the same call of the others.
"""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

AddNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # Ops.add_norm_


class Ranks:
    """One rank's view of its group. This class: a group of one, which has the whole model."""

    rank, size, num_stages = 0, 1, 1

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the sum over all ranks and return it. All ranks get the same bits."""
        return tensor

    def add_norm_(self, hidden: Tensor, part: Tensor, weight: Tensor, eps: float, add_norm: AddNorm) -> Tensor:
        """Add all ranks' `part` to `hidden` in place, [T, H] float32; returns the norm of the sum, in part's dtype.

        `add_norm`: the same for one rank. May overwrite `part`.
        """
        return add_norm(hidden, self.all_reduce_(part), weight, eps)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[S, n], the same shape on each rank |-> [S, size * n], columns of rank 0 first."""
        return tensor

    def own_rows(self, count: int) -> slice:
        """Those of `count` rows whose tokens this rank samples."""
        return slice(0, count)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """[S, n], as in `all_gather` |-> [m, size * n]: like `all_gather`, for this rank's own rows only."""
        return tensor

    def gather_rows(self, tensor: Tensor, count: int) -> Tensor:
        """[m], a value for each of this rank's own rows |-> [count], the values of all ranks."""
        return tensor

    def barrier(self, device: torch.device) -> None:
        """Launches a barrier: it completes on `device` after everything that any rank launched before it."""

    def all_reduce_min(self, number: int, device: torch.device) -> int:
        """The minimum over all ranks. Waits for all."""
        return number


ONE_RANK = Ranks()


def end_group_member(code: int) -> NoReturn:
    """End this process, which was in a group: torch sometimes aborts while its libraries are taken down at the exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
