"""Weights in groups of 32 along K: codes of 4 or 8 bits, and each group's scale and minimum.

The one form into which 4-bit checkpoints are brought, whatever their bits were called; it keeps each value exactly.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32
ALIGNED = 16  # values: from rows that begin at multiples of it a GPU reads several float16 at once, ahead of their use
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


class Tables(IntEnum):
    """The values stored for each group besides its codes; enum Tables of cpu_groups.cpp."""

    SCALES = 0  # float16; the middle code, 8 or 128, stands for 0
    ZEROS = 1  # float16: scales, and the codes that stand for 0
    MINIMUMS = 2  # float16: scales and minimums
    SCALES_32 = 3  # the same in float32
    MINIMUMS_32 = 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self >= Tables.SCALES_32 else torch.float16

    @property
    def column_bytes(self) -> int:
        """Bytes of one group's values."""
        return self.dtype.itemsize * (1 if self in (Tables.SCALES, Tables.SCALES_32) else 2)

    def fit(self, groups: Groups) -> tuple[Tensor, Tensor] | None:
        """Scales and the second table, [N, K / 32] `dtype` each, if they give exactly what `groups` holds."""
        scale = groups.scale.to(self.dtype)
        if self in (Tables.MINIMUMS, Tables.MINIMUMS_32):
            second = groups.minimum.to(self.dtype)
            minimum = second.float()
        else:
            middle = torch.tensor(1 << groups.bits - 1).half()
            second = (-groups.minimum / groups.scale).nan_to_num().round().half() if self is Tables.ZEROS else middle
            minimum = -(groups.scale * second.float())
        is_exact = torch.equal(scale.float(), groups.scale) and torch.equal(minimum, groups.minimum)
        return (scale, second) if is_exact and bool((scale + second).isfinite().all()) else None

    @classmethod
    def smallest(cls, parts: Sequence[Groups]) -> "Tables":
        """Those that hold all parts exactly. ValueError if a scale or minimum is not finite."""
        for tables in sorted(cls, key=lambda tables: tables.column_bytes):
            if all(tables.fit(part) is not None for part in parts):
                return tables
        raise ValueError("scales or minimums of groups are not finite")


class StoredGroups(NamedTuple):
    """[N, K] as a GPU keeps it, for cuda/gpu_groups.py; the values are those of the `Groups` it is made from."""

    codes: Tensor  # [N, K] uint8; of 4 bits [N, K / 2]: byte j of a group's 16 has code j, and above it code j + 16
    scale: Tensor  # [N, G] float16 or float32: K / 32 values, then zeros up to a multiple of ALIGNED
    second: Tensor | None  # the same: minimums, or the codes that stand for 0; None: the middle code does
    bits: int  # 4 or 8
    has_minimums: bool

    def dense(self) -> Tensor:
        """[N, K] float32"""
        codes, bits = self.codes, self.bits
        if bits == 4:
            halves = codes.unflatten(1, (-1, GROUP // 2))  # type: ignore[no-untyped-call]  # [N, K / 32, 16]
            codes = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
        num_groups = codes.shape[1] // GROUP
        scale = self.scale[:, :num_groups].float()
        second = 1 << bits - 1 if self.second is None else self.second[:, :num_groups].float()
        if self.has_minimums and isinstance(second, Tensor):
            return Groups(codes, scale, second, bits).dense()
        return with_zeros(codes, scale, second, bits).dense()


def store_groups(groups: Groups, device: torch.device, kind: Tables | None = None) -> StoredGroups:
    """On `device`, with the smallest tables that are exact. ValueError if a scale or minimum is not finite."""
    kind = Tables.smallest([groups]) if kind is None else kind
    tables = kind.fit(groups)
    assert tables is not None, "Tables.smallest has tried it"
    num_tables = 1 if kind in (Tables.SCALES, Tables.SCALES_32) else 2
    scale, *others = [functional.pad(table, (0, -table.shape[1] % ALIGNED)) for table in tables[:num_tables]]
    second = others[0].to(device) if others else None
    codes = groups.codes
    if groups.bits == 4:
        halves = codes.unflatten(1, (-1, 2, GROUP // 2))  # type: ignore[no-untyped-call]  # [N, K / 32, 2, 16]
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    has_minimums = kind in (Tables.MINIMUMS, Tables.MINIMUMS_32)
    return StoredGroups(codes.contiguous().to(device), scale.to(device), second, groups.bits, has_minimums)
