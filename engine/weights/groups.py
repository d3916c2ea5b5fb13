"""Weights in groups of 32 along K: codes of 4 or 8 bits, and each group's scale and minimum.

The one form into which 4-bit checkpoints are brought, whatever their bits were called; it keeps each value exactly.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
SHRINKS = 1 - 0.02 * torch.arange(16)  # of the scale at which no value is clipped: what rounding to 4 bits tries


class Groups(NamedTuple):
    """w[n, k] = scale[n, k // 32] * codes[n, k] + minimum[n, k // 32], product and sum rounded to float32."""

    codes: Tensor  # [N, K] uint8
    scale: Tensor  # [N, K / 32] float32
    minimum: Tensor  # the same
    bits: int  # 4 or 8

    def dense(self) -> Tensor:
        """[N, K] float32"""
        grouped = self.codes.float().unflatten(1, (-1, GROUP))  # type: ignore[no-untyped-call]
        found: Tensor = grouped.mul_(self.scale[..., None]).add_(self.minimum[..., None]).flatten(1)
        return found

    def each(self, change: Callable[[Tensor], Tensor]) -> "Groups":
        """`change`: of rows, which all three have."""
        return Groups(change(self.codes), change(self.scale), change(self.minimum), self.bits)

    def columns(self, begin: int, count: int) -> "Groups | None":
        """Columns from `begin` on; None if they cut a group."""
        if begin % GROUP or count % GROUP:
            return None
        first, number = begin // GROUP, count // GROUP
        return Groups(
            self.codes.narrow(1, begin, count),
            self.scale.narrow(1, first, number),
            self.minimum.narrow(1, first, number),
            self.bits,
        )


def join_groups(parts: Sequence[Groups]) -> Groups:
    """Rows of one after those of the other. The parts have equally many bits."""
    codes, scale, minimum, _ = zip(*parts, strict=True)
    return Groups(torch.cat(codes), torch.cat(scale), torch.cat(minimum), parts[0].bits)


def with_zeros(codes: Tensor, scale: Tensor, zeros: Tensor | int, bits: int) -> Groups:
    """For formats with w = scale * (code - zero): [N, K], [N, K / 32] float32, zeros like scale."""
    return Groups(codes, scale, -(scale * zeros), bits)


def round_to_8_bits(rows: Tensor) -> Groups:
    """[N, K] of any float dtype |-> the nearest codes, if the largest value of a group is 127: 8.5 bits a weight."""
    grouped = rows.float().unflatten(1, (-1, GROUP))  # type: ignore[no-untyped-call]  # [N, K / 32, 32]
    scale = (grouped.abs().amax(2) / 127).half().float()
    factor = torch.where(scale != 0, 1 / scale, 0.0)
    codes = (grouped * factor[..., None]).round_().add_(128).clamp_(0, 255).to(torch.uint8)
    return with_zeros(codes.flatten(1), scale, 128, 8)


def round_to_4_bits(rows: Tensor) -> Groups:
    """[N, K] of any float dtype |-> the nearest codes under the scale, of 16 tried, with the least squared error.

    The value of code 8 is 0, and scales are float16 numbers: 4.5 bits a weight.
    """
    grouped = rows.float().unflatten(1, (-1, GROUP))  # type: ignore[no-untyped-call]  # [N, K / 32, 32]
    peak = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))  # [N, K / 32, 1], with its sign
    scale = torch.zeros_like(peak[..., 0])
    best = torch.full_like(scale, torch.inf, dtype=torch.float64)
    codes = torch.full(grouped.shape, 8, dtype=torch.uint8)
    for shrink in SHRINKS.tolist():
        tried = (peak * (shrink / -8)).half().float()
        factor = torch.where(tried != 0, 1 / tried, 0.0)
        found = (grouped * factor).round_().add_(8).clamp_(0, 15)
        error = ((found - 8) * tried - grouped).double().square_().sum(2)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scale = torch.where(is_better, tried[..., 0], scale)
        codes = torch.where(is_better[..., None], found.to(torch.uint8), codes)
    return with_zeros(codes.flatten(1), scale, 8, 4)
