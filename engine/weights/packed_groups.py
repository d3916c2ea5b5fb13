"""Packed weights in groups of 32 along K, of 4 or 8 bits, for `PackedLinear`, by cpu_groups.cpp; rounding to them.

Rows are rounded to 8 bits per group while they are multiplied. Knows the layout, not where memory comes from.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from functools import cache

import torch
from torch import Tensor

from engine.kernels.build import BuildError, load_kernel
from engine.weights.groups import GROUP, SHRINKS, Groups, round_to_4_bits, with_zeros
from engine.weights.packed import BLOCK_COLUMNS, BatonProduct, Matrix, MatrixShape


class Form(IntFlag):
    """enum Form of cpu_groups.cpp."""

    EIGHT_BITS = 1  # else 4
    FLOAT32 = 2  # scales and minimums; else float16
    MINIMUMS = 4  # else the middle code is 0

    @classmethod
    def of(cls, groups: Groups) -> "Form":
        """The smallest that holds them exactly. A matrix of several parts needs all parts' forms, joined by `|`."""
        form = cls.EIGHT_BITS if groups.bits == 8 else cls(0)
        tables = [groups.scale]
        if not torch.equal(groups.minimum, -(groups.scale * (1 << groups.bits - 1))):
            form |= cls.MINIMUMS
            tables.append(groups.minimum)
        halves = (table.half() for table in tables)
        is_exact = all(
            torch.equal(half.float(), table) and bool(half.isfinite().all())
            for half, table in zip(halves, tables, strict=True)
        )
        return form if is_exact else form | cls.FLOAT32


@dataclass(frozen=True, slots=True)
class GroupsShape(MatrixShape):
    """[N / 32][K / 32] times: codes [2 panels][words][16 columns], scales [2][16], perhaps minimums [2][16]."""

    form: Form

    def __post_init__(self) -> None:
        if self.depth % GROUP:
            raise ValueError(f"groups of {GROUP} do not divide {self.depth} values")

    @property
    def bits(self) -> int:
        return 8 if Form.EIGHT_BITS in self.form else 4

    @property
    def table_dtype(self) -> torch.dtype:
        return torch.float32 if Form.FLOAT32 in self.form else torch.float16

    @property
    def num_bytes(self) -> int:
        num_tables = 2 if Form.MINIMUMS in self.form else 1
        column_bytes = GROUP * self.bits // 8 + num_tables * self.table_dtype.itemsize  # of a group
        return self.num_blocks * BLOCK_COLUMNS * (self.depth // GROUP) * column_bytes


class PackedGroups(Matrix):
    """Weights in groups. Products and rows are those of `Groups`, but for their sums' order."""

    __slots__ = ()
    shape: GroupsShape

    def __init__(self, memory: Tensor, shape: GroupsShape) -> None:
        super().__init__(memory, shape)

    def fill(self, groups: Groups, first_panel: int = 0, step: int = 1) -> None:
        """Pack rows into every `step`-th panel. The memory must be zeros before the first call."""
        shape = self.shape
        is_held = Form.of(groups) | shape.form == shape.form and groups.bits == shape.bits
        if not is_held or not self._fits(groups.codes, first_panel, step):
            raise ValueError(
                f"{groups.bits} bits {tuple(groups.codes.shape)} of {Form.of(groups)!r} from panel {first_panel} on do "
                f"not fit {shape}"
            )
        codes = groups.codes.contiguous()
        scale, minimum = (table.to(shape.table_dtype).contiguous() for table in (groups.scale, groups.minimum))
        _load().baton_pack_groups(
            codes.data_ptr(), scale.data_ptr(), minimum.data_ptr(), *codes.shape, shape.form, self.memory.data_ptr(),
            first_panel, step, torch.get_num_threads(),
        )  # fmt: skip

    def _take(self, ids: Tensor, rows: Tensor) -> None:
        _load().baton_take_group_rows(
            self.memory.data_ptr(), self.shape.form, self.shape.depth, ids.data_ptr(), len(ids), rows.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

    def product(self) -> tuple[Callable[[int], object], BatonProduct]:
        return _load().baton_multiply_groups, BatonProduct(form=self.shape.form)


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
