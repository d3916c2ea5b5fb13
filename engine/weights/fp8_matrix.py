"""e4m3 weights as checkpoints have them. Knows their values, and no product."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK = 128  # columns that share a scale, if not all do


class Fp8Matrix(NamedTuple):
    """w[n, k] = codes[n, k] * scale[n, k // BLOCK], or * scale[n], rounded to float32."""

    codes: Tensor  # [N, K] e4m3
    scale: Tensor  # [N, ceil(K / BLOCK)] or [N] float32

    def dense(self) -> Tensor:
        """[N, K] float32"""
        if self.scale.ndim == 1:
            return self.codes.float() * self.scale[:, None]
        return self.codes.float() * self.scale.repeat_interleave(BLOCK, 1)[:, : self.codes.shape[1]]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Fp8Matrix":
        """`change`: of rows, which both have."""
        return Fp8Matrix(change(self.codes), change(self.scale))

    def columns(self, begin: int, count: int) -> "Fp8Matrix | None":
        """Columns from `begin` on; None if they cut a block."""
        end, depth = begin + count, self.codes.shape[1]
        codes = self.codes.narrow(1, begin, count)
        if self.scale.ndim == 1:
            return Fp8Matrix(codes, self.scale)
        if begin % BLOCK or (end % BLOCK and end != depth):
            return None
        return Fp8Matrix(codes, self.scale[:, begin // BLOCK : -(-end // BLOCK)])
