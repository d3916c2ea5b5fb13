"""Linear layers over packed weights, by C++ kernels, on CPUs; matrices in tiles of bfloat16 or 8 bits.

Kernels check nothing; this file checks all arguments.
"""

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from engine.adapters.linear import interleave_panels
from engine.cpu import cpu_adapters
from engine.cpu.build import BuildError, cpu_flags, load_kernel
from engine.cpu.cache import Weights
from engine.cpu.cpu_math import choose_math
from engine.layers.linear import Embedding

PANEL_COLUMNS, BLOCK_COLUMNS = 16, 32
TILE_LINE_WORDS, TILE_BYTES = 16, 2048  # 4-byte words along K; bytes of both panels of a block
UNPACKED_VALUES = 4 << 20  # at once, for torch's product: 8 MiB
NEVER = 1 << 62  # rows
TIMED_SIZE = 2048  # outputs and depth of the products that are timed
FROM_ROWS = {128: 32, 8: 4, 1: 1}  # rows that are timed |-> the range that they stand for begins here
CLEARLY = 1.25  # times as fast: a difference that other work on the machine does not make
TRIES = 3
BFLOAT16_FLAGS = frozenset(("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"))  # instructions, as Linux names them


class Epilogue(IntEnum):
    """The kernel's last work on the sums; enum Epilogue of cpu_multiply.h."""

    ROUNDED = 0  # [T, N] bfloat16
    FLOATS = 1  # [T, N] float32
    GATED = 2  # [T, N / 2] bfloat16: silu(gate) * up


class BatonProduct(ctypes.Structure):
    """struct BatonProduct of cpu_multiply.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "scale", "shift", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_columns", "depth")),
        *((name, ctypes.c_int32) for name in ("form", "epilogue", "math", "num_threads")),
    ]


@dataclass(frozen=True, slots=True)
class MatrixShape(ABC):
    """A matrix [N, K] in blocks of 32 columns, two panels of 16 each, padded by zeros."""

    num_columns: int  # N
    depth: int  # K

    @property
    def num_padded(self) -> int:
        return -(-self.num_columns // BLOCK_COLUMNS) * BLOCK_COLUMNS

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...


class Matrix(ABC):
    """Weights [N, K] in memory that others may share. Read-only after it is filled."""

    __slots__ = ("memory", "shape")
    shape: MatrixShape

    def __init__(self, memory: Tensor, shape: MatrixShape) -> None:
        """memory: [shape.num_bytes] uint8 or more, aligned to 64 bytes."""
        if memory.dtype is not torch.uint8 or memory.numel() < shape.num_bytes or memory.data_ptr() % 64:
            raise ValueError(f"{memory.numel()} values of {memory.dtype} do not hold {shape}")
        self.memory = memory
        self.shape = shape

    def take_rows(self, ids: Tensor) -> Tensor:
        """[n] int64 |-> [n, K] bfloat16."""
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_cpu:
            raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)} on {ids.device}, expected int64 [n] on cpu")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape.num_columns:
            raise ValueError(f"ids reach {int(ids.max())}, expected 0 to {self.shape.num_columns - 1}")
        rows = torch.empty(len(ids), self.shape.depth, dtype=torch.bfloat16)
        self._take(ids.contiguous(), rows)
        return rows

    @abstractmethod
    def product(self) -> tuple[Callable[[int], object], BatonProduct]:
        """The kernel's function, and its argument with what is known of the weights."""

    @abstractmethod
    def _take(self, ids: Tensor, rows: Tensor) -> None:
        """Writes `rows`."""

    def _fits(self, rows: Tensor, first_panel: int, step: int) -> bool:
        """Whether rows [n, K] fit into every `step`-th panel."""
        last_panel = first_panel + step * (-(-len(rows) // PANEL_COLUMNS) - 1)
        return rows.shape[1] == self.shape.depth and PANEL_COLUMNS * last_panel < self.shape.num_padded


@dataclass(frozen=True, slots=True)
class PackedShape(MatrixShape):
    """Tiles of bfloat16 or 8 bits: [N / 32][K / depth of a tile][2 panels][16 words][16 columns]."""

    is_8bit: bool

    @property
    def tile_bytes(self) -> int:
        """Bytes of all tiles."""
        tile_depth = TILE_LINE_WORDS * (4 if self.is_8bit else 2)
        return self.num_padded // BLOCK_COLUMNS * -(-self.depth // tile_depth) * TILE_BYTES

    @property
    def num_bytes(self) -> int:
        """Tiles, then for 8 bits each column's scale and shift."""
        return self.tile_bytes + (8 * self.num_padded if self.is_8bit else 0)


class PackedMatrix(Matrix):
    """In bfloat16, or 8 bits with a scale per column."""

    __slots__ = ("scale", "shift")
    shape: PackedShape

    def __init__(self, memory: Tensor, shape: PackedShape) -> None:
        super().__init__(memory, shape)
        tables = memory[shape.tile_bytes : shape.num_bytes].view(torch.int32)
        self.scale = tables[: shape.num_padded].view(torch.float32)  # [N padded], or empty
        self.shift = tables[shape.num_padded :]  # [N padded], or empty

    def fill(self, rows: Tensor, first_panel: int = 0, step: int = 1) -> None:
        """Pack rows [n, K] bfloat16 into every `step`-th panel. The memory must be zeros before the first call."""
        if rows.dtype is not torch.bfloat16 or not self._fits(rows, first_panel, step):
            raise ValueError(f"{rows.dtype} {tuple(rows.shape)} from panel {first_panel} on do not fit {self.shape}")
        rows = rows.contiguous()
        _load().baton_pack(
            rows.data_ptr(), *rows.shape, self.memory.data_ptr(), first_panel, step,
            *self._tables(), torch.get_num_threads(),
        )  # fmt: skip

    def _tables(self) -> tuple[int | None, int | None]:
        return (self.scale.data_ptr(), self.shift.data_ptr()) if self.shape.is_8bit else (None, None)

    def take_panels(self, first: int, count: int) -> Tensor:
        """[PANEL_COLUMNS * count, K] bfloat16: the columns from a panel on, for torch's product."""
        if self.shape.is_8bit or not 0 <= first <= first + count <= self.shape.num_padded // PANEL_COLUMNS:
            raise ValueError(f"panels {first} to {first + count} cannot be taken from {self.shape}")
        columns = torch.empty(PANEL_COLUMNS * count, self.shape.depth, dtype=torch.bfloat16)
        _load().baton_unpack(
            self.memory.data_ptr(), first, count, self.shape.depth, columns.data_ptr(), torch.get_num_threads()
        )
        return columns

    def _take(self, ids: Tensor, rows: Tensor) -> None:
        _load().baton_take_rows(
            self.memory.data_ptr(), self._tables()[0], self.shape.depth, ids.data_ptr(), len(ids), rows.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

    def product(self) -> tuple[Callable[[int], object], BatonProduct]:
        scale, shift = self._tables()
        is_8bit = self.shape.is_8bit
        return _load().baton_multiply, BatonProduct(scale=scale, shift=shift, form=is_8bit, math=choose_math(is_8bit))


def panel_order(parts: Sequence[Tensor], is_gated: bool) -> Tensor:
    """Values of columns |-> [N padded], in the order of the packed columns; with `is_gated` the two parts alternate."""
    if not is_gated:
        joined = torch.cat(list(parts))
        return functional.pad(joined, (0, -len(joined) % BLOCK_COLUMNS))
    return interleave_panels(parts, PANEL_COLUMNS)


class PackedLinear:
    """y = x W^T + b, see `Linear`, followed by `epilogue`. A row's outputs do not depend on other rows, but by whether
    there are so many that torch multiplies them."""

    panel_columns = PANEL_COLUMNS
    __slots__ = ("_arguments", "_bias", "_epilogue", "_matrix", "_multiply", "_torch_rows", "num_outputs")

    def __init__(
        self, matrix: Matrix, bias: Tensor | None = None, epilogue: Epilogue = Epilogue.ROUNDED,
        torch_rows: int = NEVER,
    ) -> None:  # fmt: skip
        """bias: [N padded] float32, in `panel_order`. torch_rows: from how many rows on torch multiplies bfloat16."""
        shape = matrix.shape
        if bias is not None and (bias.dtype is not torch.float32 or len(bias) != shape.num_padded):
            raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}, expected float32 of {shape} padded")
        self._matrix = matrix
        self._bias = bias
        self._epilogue = epilogue
        is_bfloat16 = isinstance(matrix, PackedMatrix) and not matrix.shape.is_8bit
        self._torch_rows = torch_rows if is_bfloat16 and epilogue is not Epilogue.FLOATS else NEVER
        self.num_outputs = shape.num_columns // (2 if epilogue is Epilogue.GATED else 1)
        self._multiply, self._arguments = matrix.product()
        self._arguments.w = matrix.memory.data_ptr()
        self._arguments.bias = None if bias is None else bias.data_ptr()
        self._arguments.depth = shape.depth

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [T, K] bfloat16 |-> [T, num_outputs]"""
        if self._is_for_torch(rows):
            out = self.split(rows)
            if self._epilogue is Epilogue.GATED:
                return self.join(out)
            return out[:, : self.num_outputs].contiguous()
        dtype = torch.float32 if self._epilogue is Epilogue.FLOATS else torch.bfloat16
        return self._multiply_into(torch.empty(len(rows), self.num_outputs, dtype=dtype), rows, self._epilogue)

    def split(self, rows: Tensor) -> Tensor:
        """Without the epilogue: [T, K] bfloat16 |-> [T, N padded], gate and up in panels that alternate."""
        if self._is_for_torch(rows):
            return self._by_torch(rows)
        out = torch.empty(len(rows), self._matrix.shape.num_padded, dtype=torch.bfloat16)
        return self._multiply_into(out, rows, Epilogue.ROUNDED)

    def join(self, gate_up: Tensor) -> Tensor:
        """The result of `split` |-> [T, num_outputs]"""
        if len(gate_up) < self._torch_rows:
            return cpu_adapters.join(gate_up, self.num_outputs)
        gate, up = gate_up.view(len(gate_up), -1, 2, PANEL_COLUMNS).unbind(2)
        return functional.silu(gate).mul_(up).flatten(1)[:, : self.num_outputs].contiguous()

    def _is_for_torch(self, rows: Tensor) -> bool:
        """Checks the rows, too."""
        depth = self._matrix.shape.depth
        if rows.dim() != 2 or rows.shape[1] != depth or rows.dtype is not torch.bfloat16 or not rows.is_cpu:
            raise ValueError(
                f"rows are {rows.dtype} {tuple(rows.shape)} on {rows.device}, expected bfloat16 [T, {depth}] on cpu"
            )
        return len(rows) >= self._torch_rows

    def _multiply_into(self, out: Tensor, rows: Tensor, epilogue: Epilogue) -> Tensor:
        rows, arguments = rows.contiguous(), self._arguments
        arguments.x, arguments.out, arguments.num_rows = rows.data_ptr(), out.data_ptr(), len(rows)
        arguments.epilogue, arguments.num_threads = epilogue, torch.get_num_threads()
        is_split = self._epilogue is Epilogue.GATED and epilogue is Epilogue.ROUNDED
        arguments.num_columns = self._matrix.shape.num_padded if is_split else self._matrix.shape.num_columns
        self._multiply(ctypes.addressof(arguments))
        return out

    def _by_torch(self, rows: Tensor) -> Tensor:
        """[T, N padded] by torch's product, of a part of the columns at a time."""
        matrix = self._matrix
        assert isinstance(matrix, PackedMatrix)
        num_panels = matrix.shape.num_padded // PANEL_COLUMNS
        at_once = max(UNPACKED_VALUES // (matrix.shape.depth * PANEL_COLUMNS), 1)
        out = torch.empty(len(rows), num_panels * PANEL_COLUMNS, dtype=torch.bfloat16)
        for first in range(0, num_panels, at_once):
            weight = matrix.take_panels(first, min(at_once, num_panels - first))
            columns = slice(first * PANEL_COLUMNS, first * PANEL_COLUMNS + len(weight))
            bias = None if self._bias is None else self._bias[columns].bfloat16()
            out[:, columns] = functional.linear(rows, weight, bias)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class PackedEmbedding(Embedding):
    """A packed table: tied to a head, it shares the head's weights. `weight` is empty."""

    matrix: Matrix

    def __len__(self) -> int:
        return self.matrix.shape.num_columns

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.matrix.take_rows(token_ids)


@cache
def choose_torch_rows() -> int:
    """From how many rows on torch's product, with unpacking, is clearly faster than the kernel; NEVER as a rule.

    It happens where torch uses instructions that the compiler does not know, such as AMX with GCC 10. A CPU without any
    for bfloat16 is not timed: that takes each worker half a second.
    """
    if (flags := cpu_flags()) and flags.isdisjoint(BFLOAT16_FLAGS):
        return NEVER
    matrix = pack(torch.randn(TIMED_SIZE, TIMED_SIZE, dtype=torch.bfloat16))
    kernel, by_torch = PackedLinear(matrix), PackedLinear(matrix, torch_rows=0)
    chosen = NEVER
    for num_rows, first in FROM_ROWS.items():
        rows = torch.randn(num_rows, TIMED_SIZE, dtype=torch.bfloat16)
        if CLEARLY * time_best(lambda: by_torch(rows)) > time_best(lambda: kernel(rows)):  # noqa: B023  called here
            break
        chosen = first
    return chosen


def pack(weight: Tensor, *, is_8bit: bool = False) -> PackedMatrix:
    """[N, K] bfloat16, in memory of its own."""
    shape = PackedShape(len(weight), weight.shape[1], is_8bit)
    memory = Weights().take("", shape.num_bytes, lambda memory: PackedMatrix(memory, shape).fill(weight))
    return PackedMatrix(memory, shape)


def time_best(call: Callable[[], Tensor]) -> float:
    """Seconds, the best of few tries."""
    call()
    taken = []
    for _ in range(TRIES):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def can_pack() -> bool:
    """Whether the kernel can be built here. If not, attention reports the missing compiler."""
    try:
        _load()
    except BuildError:
        return False
    return True


@cache
def _load() -> ctypes.CDLL:
    kernel = load_kernel("cpu_linear")
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kernel.baton_pack.argtypes = [pointer, count, count, pointer, count, count, pointer, pointer, number]
    kernel.baton_take_rows.argtypes = [pointer, pointer, count, pointer, count, pointer, number]
    kernel.baton_unpack.argtypes = [pointer, count, count, count, pointer, number]
    kernel.baton_multiply.argtypes = [pointer]
    for function in (kernel.baton_pack, kernel.baton_take_rows, kernel.baton_unpack, kernel.baton_multiply):
        function.restype = None
    return kernel
