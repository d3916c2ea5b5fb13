"""Small sums over ranks without NCCL: each rank's GPU reads the parts of all others in one kernel.

Imports Triton: only `join_group` imports this, on a GPU.
"""

from collections.abc import Sequence
from functools import partial

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from engine.cuda import gpu_ranks
from engine.cuda.cuda_memory import CudaError, DeviceBytes
from engine.cuda.gpu import Gpu
from engine.cuda.gpu_ranks import MAX_ROW_BYTES, MAX_ROWS, SharedRows
from engine.rank_group import GroupRanks
from engine.ranks import AddNorm

SIZES = (2, 4, 8)
# Estimates for an H100 by NVLink, to be measured: what a sum by NCCL takes longer to begin and end, 2 (N - 1) messages
# one after the other against one, and what a GPU reads from all others together.
SAVED_S = 10e-6
READ_BYTES_PER_S = 300e9
# rows, width and dtype of first sums
PROBES: Sequence[tuple[int, int, torch.dtype]] = (
    (1, 64, torch.float32),
    (3, 200, torch.bfloat16),
    (MAX_ROWS, 128, torch.float16),
)

log = structlog.get_logger()


def choose_limit(size: int) -> int:
    """The bytes of a part up to which one kernel is faster.

    It reads (N - 1) n bytes and NCCL 2 (N - 1) / N n: with two ranks as many.
    """
    surplus = (size - 1) * (1 - 2 / size)  # reads of a whole part
    most = MAX_ROWS * MAX_ROW_BYTES
    return min(most, int(SAVED_S * READ_BYTES_PER_S / surplus)) if surplus else most


class OneShotRanks(GroupRanks):
    """Adds small tensors by one kernel. Keeps its buffer and the peers' open until the process ends."""

    def __init__(self, group: dist.ProcessGroup, shared: SharedRows) -> None:
        super().__init__(group)
        self._shared = shared
        self._limit = choose_limit(shared.size)

    def _fits(self, part: Tensor) -> bool:
        """The same on all ranks, as their parts have the same shape."""
        return part.nbytes <= self._limit and gpu_ranks.fits(part)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return gpu_ranks.all_reduce_(tensor, self._shared) if self._fits(tensor) else super().all_reduce_(tensor)

    def add_norm_(self, hidden: Tensor, part: Tensor, weight: Tensor, eps: float, add_norm: AddNorm) -> Tensor:
        if self._fits(part):
            return gpu_ranks.add_norm_(hidden, part, weight, eps, self._shared)
        return super().add_norm_(hidden, part, weight, eps, add_norm)


def open_ranks(group: dist.ProcessGroup, device: torch.device, gpu: Gpu) -> OneShotRanks | None:
    """None, with a line in the log, where GPUs cannot set flags in each other's memory or first sums are wrong.

    All ranks call this and get the same. Rank n has the n-th GPU.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    agree = partial(_agree, group, device)
    others = [peer for peer in range(size) if peer != rank]
    if size not in SIZES or not agree(all(gpu.cudart.has_atomics(rank, peer) for peer in others)):
        log.info("sums over ranks by NCCL: these GPUs cannot set flags in each other's memory", ranks=size)
        return None
    shared = _open_rows(group, device, gpu)
    if not agree(shared is not None) or shared is None:
        log.warning("sums over ranks by NCCL: a rank cannot open the others' memory; see the lines before")
        return None
    found = [_is_right(group, device, shared, *probe) for probe in PROBES]  # by all ranks
    if not agree(all(found)):
        log.warning("sums over ranks by NCCL: first sums by one kernel were wrong")
        return None
    log.info("small sums over ranks by one kernel", ranks=size, up_to_bytes=choose_limit(size))
    return OneShotRanks(group, shared)


def _agree(group: dist.ProcessGroup, device: torch.device, is_able: bool) -> bool:
    """Whether all ranks are."""
    found = torch.tensor([int(is_able)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return bool(found)


def _open_rows(group: dist.ProcessGroup, device: torch.device, gpu: Gpu) -> SharedRows | None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_bytes = gpu_ranks.buffer_bytes(size)
    own: tuple[DeviceBytes, bytes] | None = None
    handles: list[bytes | None] = [None] * size
    try:
        memory = DeviceBytes(gpu.cudart, num_bytes)
        own = memory, gpu.cudart.export(memory.address)
        buffer = gpu.view(memory).zero_()
    except CudaError as error:
        log.warning("no memory for sums over ranks", error=str(error))
    _agree(group, device, True)  # all buffers are zero before any flag is set
    dist.all_gather_object(handles, own and own[1], group=group)
    if own is None or not all(handles):
        return None
    try:
        addresses = [
            own[0].address if peer == rank else gpu.cudart.open(handle or b"", num_bytes)
            for peer, handle in enumerate(handles)
        ]
    except CudaError as error:
        log.warning("another rank's memory cannot be opened", error=str(error))
        return None
    offsets = torch.tensor([address - own[0].address for address in addresses], device=device)
    return SharedRows(buffer, offsets, torch.zeros(MAX_ROWS, dtype=torch.int32, device=device), rank, size)


def _is_right(
    group: dist.ProcessGroup, device: torch.device, shared: SharedRows, num_rows: int, width: int, dtype: torch.dtype
) -> bool:
    """Both places of a row are used twice."""
    is_right = True
    for seed in range(4):
        generator = torch.Generator().manual_seed(shared.size * seed + shared.rank)
        part = torch.randn(num_rows, width, generator=generator).to(device, dtype)
        expected = part.float()
        dist.all_reduce(expected, group=group)
        found = gpu_ranks.all_reduce_(part, shared)
        is_right &= torch.allclose(found.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    return is_right
