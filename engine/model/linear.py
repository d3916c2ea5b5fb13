"""A linear layer that owns how its weights lie in memory. Models multiply by it and never see the layout."""

from torch import Tensor
from torch.nn import functional


class Linear:
    """y = x W^T + b in the plain layout: W [N, K] row-major, possibly straight from a read-only file mapping.

    Weights are never written. Another layout (tile order, quantised) is another choice made here at construction.
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [N, K]; bias: [N] in the same dtype and on the same device, or None."""
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [T, K] in the dtype of the weights |-> [T, N], contiguous."""
        return functional.linear(rows, self._weight, self._bias)
