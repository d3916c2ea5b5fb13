"""The processes that compute one model together, one shard each: their exchanges within a step.

Every rank runs the same steps in the same order, so each call here meets the same call of the others.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # ranks are on one host and trust each other

AddNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # Ops.add_norm_


class Ranks:
    """One rank's view of its group. This class: a group of one, which has the whole model."""

    rank, size = 0, 1

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
        """Of `count` rows, those whose tokens this rank samples."""
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


class GroupRanks(Ranks):
    """`Ranks` as a group of torch.distributed: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, -1)

    def own_rows(self, count: int) -> slice:
        most = -(-count // self.size)
        return slice(min(self.rank * most, count), min((self.rank + 1) * most, count))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        count, width = tensor.shape
        most = -(-count // self.size)
        given = tensor.new_zeros(self.size * most, width)
        given[:count] = tensor
        taken = torch.empty_like(given)  # [size, most, n]: the columns of each rank
        dist.all_to_all_single(taken, given, group=self._group)
        rows = taken.view(self.size, most, width).transpose(0, 1).reshape(most, self.size * width)
        own = self.own_rows(count)
        return rows[: own.stop - own.start]

    def gather_rows(self, tensor: Tensor, count: int) -> Tensor:
        most = -(-count // self.size)
        given = tensor.new_zeros(most)
        given[: len(tensor)] = tensor
        parts = [torch.empty_like(given) for _ in range(self.size)]
        dist.all_gather(parts, given, group=self._group)
        return torch.cat(parts)[:count]

    def barrier(self, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def all_reduce_min(self, number: int, device: torch.device) -> int:
        found = torch.tensor([number], device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return int(found)


OpenRanks = Callable[[dist.ProcessGroup], GroupRanks]


def end_group_member(code: int) -> NoReturn:
    """End this process, which was in a group: torch sometimes aborts while its libraries are taken down at the exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join_group(
    rendezvous: str, rank: int, size: int, device: torch.device, timeout_s: float, open_ranks: OpenRanks = GroupRanks
) -> GroupRanks:
    """Meet the other ranks through a file that all name, on this host only. One group per process.

    `timeout_s`: for the meeting, and for each exchange. open_ranks: see `Device`. Raises RuntimeError if some
    do not come.
    """
    for name, interface in INTERFACES.items():
        os.environ.setdefault(name, interface)
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", f"file://{rendezvous}", timedelta(seconds=timeout_s), world_size=size, rank=rank,
        device_id=device if is_cuda else None,
    )  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    return open_ranks(group)
