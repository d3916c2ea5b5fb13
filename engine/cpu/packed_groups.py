"""Packed weights in groups of 32 along K, of 4 or 8 bits, for `PackedLinear`, by cpu_groups.cpp; rounding to them.

Rows are rounded per group while they are multiplied.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.cpu.build import BuildError, load_kernel
from engine.cpu.cpu_math import choose_math
from engine.cpu.packed import BatonProduct, Matrix, MatrixShape
from engine.formats.groups import GROUP, SHRINKS, Groups, Tables, round_to_4_bits, with_zeros

ROW_BITS = 13  # of a row's codes, which keep what a real model's outliers and near ties need
NARROW = 10  # BatonProduct's form: 4 bits with SCALES times rows of 8 bits


@dataclass(frozen=True, slots=True)
class GroupsShape(MatrixShape):
    """[N / 32][K / 32] times: codes [2 panels][words][16 columns], then tables of [2 panels][16 columns]."""

    bits: int  # 4 or 8
    tables: Tables
    row_bits: int = ROW_BITS  # to which a row's groups are rounded in products; 8 only for 4 bits and SCALES

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.depth % GROUP:
            raise ValueError(f"{self.bits} bits of {self.depth} values do not make groups of {GROUP}")
        if self.row_bits != ROW_BITS and (self.row_bits, self.bits, self.tables) != (8, 4, Tables.SCALES):
            raise ValueError(f"rows of {self.row_bits} bits are not multiplied with {self.bits} {self.tables.name}")

    @classmethod
    def of(cls, *parts: Groups, row_bits: int = ROW_BITS) -> "GroupsShape":
        """The smallest that holds rows of all parts, of one K and as many bits, exactly. Raises ValueError.

        With as few `row_bits` as this form can have, 8 or 13.
        """
        num_rows, depth = sum(len(part.codes) for part in parts), parts[0].codes.shape[1]
        tables = Tables.smallest(parts)
        is_narrow = row_bits == 8 and parts[0].bits == 4 and tables is Tables.SCALES
        return cls(num_rows, depth, parts[0].bits, tables, 8 if is_narrow else ROW_BITS)

    @classmethod
    def named(cls, name: str, num_columns: int, depth: int) -> "GroupsShape":
        """The one with this `name`."""
        bits, tables, row_bits = name.split(".")
        return cls(num_columns, depth, int(bits), Tables[tables], int(row_bits))

    @property
    def name(self) -> str:
        """All but the size."""
        return f"{self.bits}.{self.tables.name}.{self.row_bits}"

    @property
    def num_bytes(self) -> int:
        num_groups = self.num_padded * (self.depth // GROUP)
        return num_groups * (GROUP * self.bits // 8 + self.tables.column_bytes)

    @property
    def form(self) -> int:
        """BatonProduct's."""
        return NARROW if self.row_bits == 8 else 2 * self.tables + (self.bits == 8)


class PackedGroups(Matrix):
    """Weights in groups. Rows are those of `Groups`; in products each row is rounded per group.

    With AMX, weights are rounded to bfloat16 instead for as many rows as prompts have.
    """

    __slots__ = ()
    shape: GroupsShape

    def fill(self, groups: Groups, first_panel: int = 0, step: int = 1) -> None:
        """Pack rows into every `step`-th panel. The memory must be zeros before the first call."""
        shape, codes = self.shape, groups.codes
        if codes.dtype is not torch.uint8 or groups.scale.shape != (len(codes), codes.shape[1] // GROUP):
            scales = tuple(groups.scale.shape)
            raise ValueError(f"codes are {codes.dtype}, scales {scales}; expected uint8, and one of each group")
        tables = shape.tables.fit(groups)
        if tables is None or groups.bits != shape.bits or not self._fits(groups.codes, first_panel, step):
            raise ValueError(
                f"{groups.bits} bits {tuple(groups.codes.shape)} from panel {first_panel} on do not fit {shape}"
            )
        codes, scale, second = (table.contiguous() for table in (groups.codes, *tables))
        _load().baton_pack_groups(
            codes.data_ptr(), scale.data_ptr(), second.data_ptr(), *codes.shape, shape.form, self.memory.data_ptr(),
            first_panel, step, torch.get_num_threads(),
        )  # fmt: skip

    def _take(self, ids: Tensor, rows: Tensor) -> None:
        _load().baton_take_group_rows(
            self.memory.data_ptr(), self.shape.form, self.shape.depth, ids.data_ptr(), len(ids), rows.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

    def product(self) -> tuple[Callable[[int], object], BatonProduct]:
        return _load().baton_multiply_groups, BatonProduct(form=self.shape.form, math=choose_math())


def round_groups(rows: Tensor) -> Groups:
    """[N, K] bfloat16 or float32 |-> what `round_to_4_bits` gives, which computes it where there is no compiler."""
    try:
        kernel = _load()
    except BuildError:
        return round_to_4_bits(rows)
    if rows.dtype not in (torch.bfloat16, torch.float32) or rows.shape[1] % GROUP:
        raise ValueError(f"{rows.dtype} {tuple(rows.shape)} cannot be rounded in groups of {GROUP}")
    rows, shrinks = rows.contiguous(), SHRINKS / -8
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    scale = torch.empty(len(rows), rows.shape[1] // GROUP)
    kernel.baton_round_groups(
        rows.data_ptr(), rows.dtype is torch.float32, scale.numel(), shrinks.data_ptr(), len(shrinks),
        codes.data_ptr(), scale.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return with_zeros(codes, scale, 8, 4)


@cache
def _load() -> ctypes.CDLL:
    kernel = load_kernel("cpu_groups")
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kernel.baton_pack_groups.argtypes = [pointer] * 3 + [count, count, number, pointer, count, count, number]
    kernel.baton_take_group_rows.argtypes = [pointer, number, count, pointer, count, pointer, number]
    kernel.baton_multiply_groups.argtypes = [pointer]
    kernel.baton_round_groups.argtypes = [pointer, number, count, pointer, number, pointer, pointer, number]
    for name in ("pack_groups", "take_group_rows", "multiply_groups", "round_groups"):
        kernel[f"baton_{name}"].restype = None
    return kernel
