"""Ranks as a group of torch.distributed, and how a process joins it."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore

from engine.ranks import Ranks

LOOPBACK = "lo"
TCP = "tcp://"


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


def open_store(host: str, size: int, timeout_s: float) -> TCPStore:
    """Rank 0's, where ranks on other hosts find each other, on any port of an address of this host. Raises OSError."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    return TCPStore(
        host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )  # fmt: skip


def join_group(
    rendezvous: str | Store, rank: int, size: int, device: torch.device, timeout_s: float,
    open_ranks: OpenRanks = GroupRanks, interface: str = LOOPBACK,
) -> GroupRanks:  # fmt: skip
    """Meet the other ranks. One group per process.

    `rendezvous`: a file that all name, on one host; else rank 0's store or, for the others, tcp://HOST:PORT of that.
    `timeout_s`: for the meeting, and for each exchange. open_ranks: see `compose.open_ranks`. `interface`: on which
    ranks exchange, unless variables name another. Raises RuntimeError if some do not come.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    # NCCL would register the memory of each of a thousand captured sums with the peers, which takes time and memory at
    # the start (not measured).
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    is_cuda, timeout = device.type == "cuda", timedelta(seconds=timeout_s)
    if isinstance(rendezvous, str) and rendezvous.startswith(TCP):
        host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
        rendezvous = TCPStore(host.strip("[]"), int(port), size, False, timeout)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", f"file://{rendezvous}" if isinstance(rendezvous, str) else None, timeout,
        world_size=size, rank=rank, store=None if isinstance(rendezvous, str) else rendezvous,
        device_id=device if is_cuda else None,
    )  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    return open_ranks(group)
