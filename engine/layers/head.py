"""A model's last product on one rank: hidden rows to float32 logits."""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_BYTES = 32 << 20  # of weights widened to float32 at a time


class WidenedLinear:
    """y = x W^T summed and returned in float32. W: [N, K] row-major, possibly straight from a read-only mapping."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [S, K] in the dtype of the weights |-> [S, N] float32."""
        if self._weight.dtype is torch.float32:
            return functional.linear(rows, self._weight)
        if self._weight.is_cuda:
            return torch.mm(rows, self._weight.T, out_dtype=torch.float32)
        return multiply_widened(rows, self._weight)


def multiply_widened(rows: Tensor, weight: Tensor) -> Tensor:
    """[S, K], [N, K] |-> [S, N] float32: any device, any dtype. Widens one block of weights at a time, for all rows."""
    num_outputs, depth = weight.shape
    wide = rows.float()  # [S, K]
    logits = torch.empty(len(rows), num_outputs, dtype=torch.float32, device=rows.device)
    step = max(1, BLOCK_BYTES // (4 * depth))
    for begin in range(0, num_outputs, step):
        block = weight[begin : begin + step].float()  # [at most step, K]
        logits[:, begin : begin + step] = functional.linear(wide, block)
    return logits
