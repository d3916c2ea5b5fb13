"""Weights in groups as a GPU keeps them. Knows the layout that kernels/gpu_groups.py reads, and no product."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.weights.groups import GROUP, Groups, with_zeros
from engine.weights.packed_groups import GroupsShape, Tables

ALIGNED = 16  # values: from rows that begin at multiples of it a GPU reads several float16 at once, ahead of their use


class StoredGroups(NamedTuple):
    """[N, K]; the values are those of the `Groups` it is made from."""

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


def store_groups(groups: Groups, device: torch.device) -> StoredGroups:
    """On `device`, with the smallest tables that are exact. ValueError if a scale or minimum is not finite."""
    kind = GroupsShape.of(groups).tables
    tables = kind.fit(groups)
    assert tables is not None, "GroupsShape.of has tried it"
    num_tables = 1 if kind in (Tables.SCALES, Tables.SCALES_32) else 2
    scale, *others = [functional.pad(table, (0, -table.shape[1] % ALIGNED)) for table in tables[:num_tables]]
    second = others[0].to(device) if others else None
    codes = groups.codes
    if groups.bits == 4:
        halves = codes.unflatten(1, (-1, 2, GROUP // 2))  # type: ignore[no-untyped-call]  # [N, K / 32, 2, 16]
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    has_minimums = kind in (Tables.MINIMUMS, Tables.MINIMUMS_32)
    return StoredGroups(codes.contiguous().to(device), scale.to(device), second, groups.bits, has_minimums)
