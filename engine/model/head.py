"""The last product of a model: hidden rows to logits, in float32 from here on. Knows how its weights lie in memory."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.build import BuildError, load_kernel
from engine.ranks import Ranks

BLOCK_BYTES = 32 << 20  # of weights widened to float32 at a time


class Head:
    """y = x W^T, summed and returned in float32. W: [V, K] row-major, possibly straight from a read-only mapping."""

    __slots__ = ("_kernel", "_weight")

    def __init__(self, weight: Tensor) -> None:
        """weight: [V, K]. Builds the CPU kernel for bfloat16 on first use; no compiler is no error."""
        self._weight = weight
        self._kernel: ctypes.CDLL | None = None
        if weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and weight.is_contiguous():
            self._kernel = _load()

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [S, K] in the dtype of the weights |-> [S, V] float32, the caller's own.

        By the kernel, a row's logits do not depend on the others.
        """
        if self._weight.dtype is torch.float32:
            return functional.linear(rows, self._weight)
        if self._weight.is_cuda:
            return torch.mm(rows, self._weight.T, out_dtype=torch.float32)
        if self._kernel is not None:
            return _multiply(self._kernel, rows.contiguous(), self._weight)
        return multiply_widened(rows, self._weight)

    def deal(self, rows: Tensor) -> Tensor:
        """rows: [S, K] |-> [m, V]: all logits of those rows that this rank chooses tokens for, which are all."""
        return self(rows)


class JoinedHead:
    """A head of which each rank has some of the vocabulary."""

    __slots__ = ("_own", "_ranks")

    def __init__(self, own: Head, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Head`."""
        return self._ranks.join(self._own(rows))

    def deal(self, rows: Tensor) -> Tensor:
        """See `Head.deal`: some of the rows."""
        return self._ranks.deal(self._own(rows))


def multiply_widened(rows: Tensor, weight: Tensor) -> Tensor:
    """The slow twin: any device, any dtype. Widens some of the weights at a time, each once for all rows."""
    num_outputs, depth = weight.shape
    wide = rows.float()  # [S, K]
    logits = torch.empty(len(rows), num_outputs, dtype=torch.float32, device=rows.device)
    step = max(1, BLOCK_BYTES // (4 * depth))
    for begin in range(0, num_outputs, step):
        block = weight[begin : begin + step].float()  # [at most step, K]
        logits[:, begin : begin + step] = functional.linear(wide, block)
    return logits


def _load() -> ctypes.CDLL | None:
    try:
        kernel = load_kernel("cpu_head")
    except BuildError:  # attention, which wants the same compiler, tells the user
        return None
    kernel.baton_head.restype = None
    kernel.baton_head.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3, ctypes.c_int]
    return kernel


def _multiply(kernel: ctypes.CDLL, rows: Tensor, weight: Tensor) -> Tensor:
    """[S, K], [V, K], both bfloat16 and contiguous |-> [S, V]"""
    (num_rows, depth), (num_outputs, expected) = rows.shape, weight.shape
    if depth != expected or rows.dtype is not torch.bfloat16 or not rows.is_cpu:
        raise ValueError(
            f"rows are {rows.dtype} {tuple(rows.shape)} on {rows.device}, expected bfloat16 [S, {expected}]"
        )
    logits = torch.empty(num_rows, num_outputs, dtype=torch.float32)
    kernel.baton_head(
        rows.data_ptr(), weight.data_ptr(), logits.data_ptr(), num_rows, num_outputs, depth, torch.get_num_threads()
    )
    return logits
