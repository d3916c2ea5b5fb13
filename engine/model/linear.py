"""A linear layer that owns how its weights lie in memory. Models multiply by it and never see the layout."""

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """y = x W^T + b in the plain layout: W [N, K] row-major, possibly straight from a read-only file mapping.

    Weights are never written. Another layout (tile order, quantised) is another choice made here at construction.
    """

    __slots__ = ("_bias", "_has_fast_row", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [N, K]; bias: [N] in the same dtype and on the same device, or None."""
        self._weight = weight
        self._bias = bias
        # One row in half precision: torch's matrix-vector kernel reads weights 1.2 (bfloat16) to 2 times (float16) as
        # fast as its general product on the CPU, and like it sums in float32.
        self._has_fast_row = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [T, K] in the dtype of the weights |-> [T, N], contiguous."""
        if self._has_fast_row and rows.shape[0] == 1:
            return self._multiply_row(rows[0]).unsqueeze(0)
        return functional.linear(rows, self._weight, self._bias)

    def _multiply_row(self, row: Tensor) -> Tensor:
        """[K] |-> [N]"""
        return torch.mv(self._weight, row) if self._bias is None else torch.addmv(self._bias, self._weight, row)
