"""e4m3 weights with a float32 scale per output or block: their values, rounding to them, and torch's product of them.

The GPU paths have yet to run on one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK = 128  # columns that share a scale, if not all do
E4M3_MAX = 448.0
SMALLEST_PEAK = 1e-12  # gives a row of zeros a scale
NEEDED_CAPABILITY = (8, 9)  # the first GPUs that convert and multiply e4m3
# Hopper's matrix units keep 13 bits of a sum's mantissa and drop the rest after every 32 products, unless sums move to
# float32 registers now and then, which costs others 10 to 20 % of the time. Up to this depth dropped bits add less than
# a fiftieth to the error that rounding leaves (3.9 %).
FAST_DEPTH = 8192
ALIGNED = 16  # elements: torch._scaled_mm needs both sizes of W to be multiples of it


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


def can_round(codes: Tensor, scale: Tensor) -> bool:
    """Whether rows can be rounded like these weights."""
    if scale.ndim == 2:
        return codes.shape[1] % BLOCK == 0
    return not any(size % ALIGNED for size in codes.shape)


def multiply_codes(rows: Tensor, row_scale: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`FormatOps.multiply_fp8` of rows * row_scale: matrix units run at twice their bfloat16 speed.

    rows: [T, K] e4m3; row_scale: [T, 1]; scale: [N] |-> [T, N] bfloat16. Rounding x and w puts an output off by about
    2.6 % of the root of the sum of its terms' squares for each of the two.
    """
    return torch._scaled_mm(
        rows, codes.T, row_scale, scale[None, :], bias=bias, out_dtype=torch.bfloat16,
        use_fast_accum=rows.shape[1] <= FAST_DEPTH,
    )  # fmt: skip


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows: [N, K], finite |-> codes [N, K] e4m3, scale [N] float32, with codes * scale near rows.

    The largest value of a row becomes 448. |row - code * scale| <= max(|row| / 16, scale / 1024): half a step of the
    3-bit mantissa, or of the subnormals.
    """
    peak = rows.abs().amax(dim=1).float().clamp_(min=SMALLEST_PEAK)  # [N]
    scale = peak / E4M3_MAX
    # the quotient may slightly exceed 448, but never 464, beyond which it would not round back to 448
    return (rows / scale[:, None]).to(E4M3), scale


def has_fp8(device: torch.device) -> bool:
    """Whether it can convert and multiply e4m3."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= NEEDED_CAPABILITY


def check_fp8(device: torch.device, option: str = "--quantization fp8", instead: str = "--quantization none") -> None:
    """Raises ValueError if a GPU cannot convert and multiply e4m3, which `option` needs."""
    if not has_fp8(device):
        capability = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"{option} needs a GPU of compute capability {NEEDED_CAPABILITY[0]}.{NEEDED_CAPABILITY[1]} "
            f"or higher; {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: "
            f"use {instead}"
        )
