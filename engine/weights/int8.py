"""Linear layers with 8-bit weights and rows, in torch: the slow twin of packed ones, and their fallback.

A weight is code * its output's scale; a row's value is code * its row's scale. Sums of codes are exact integers.
"""

import torch
from torch import Tensor

MAX_CODE = 127


class Int8Linear:
    """y[t, n] = s[t] scale[n] * sum_k x[t, k] w[n, k] + b[n], of codes x and w; returns bfloat16 or float32."""

    __slots__ = ("_bias", "_codes", "_dtype", "_scale")

    def __init__(
        self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """codes: [N, K] int8 and scale: [N, 1] float32, from `round_rows`; bias: [N]."""
        self._codes = codes
        self._scale = scale
        self._bias = bias
        self._dtype = dtype

    def __call__(self, rows: Tensor) -> Tensor:
        codes, scale = round_rows(rows)
        sums = codes.double() @ self._codes.double().T  # [T, N]: integers, exact
        product = sums.float() * (self._scale.T * scale)
        return (product if self._bias is None else product.add_(self._bias)).to(self._dtype)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows: [T, K] |-> codes [T, K] int8, scale [T, 1] float32. The largest value of a row becomes 127 or -127."""
    scale = rows.abs().amax(dim=1, keepdim=True).float() / MAX_CODE  # [T, 1]
    factor = torch.where(scale > 0, 1 / scale, 0.0)
    return (rows.double() * factor.double()).round().to(torch.int8), scale  # rounded once, like the kernel
