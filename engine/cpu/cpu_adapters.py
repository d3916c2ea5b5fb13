"""Adds the products of adapters on a CPU, by cpu_adapters.cpp."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.adapters.rows import AdapterTiles, AdapterWeights, check_product
from engine.cpu.build import BuildError, load_kernel


class BatonAdapters(ctypes.Structure):
    """struct BatonAdapters of cpu_adapters.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "a", "b", "ranks", "rows", "tiles", "blocks", "out", "shrunk")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_tiles", "num_blocks", "depth", "num_columns", "num_parts", "max_rank")
        ),
        ("num_threads", ctypes.c_int32),
    ]


def can_add(out: Tensor, rows: Tensor) -> bool:
    """Whether the kernel takes them."""
    is_known = rows.dtype in (torch.bfloat16, torch.float32) and out.dtype is rows.dtype
    return is_known and rows.is_contiguous() and out.is_contiguous() and load() is not None


def add_adapters_(out: Tensor, rows: Tensor, tiles: AdapterTiles, weights: AdapterWeights) -> None:
    """See `AdapterOps.add_adapters_` and `can_add`."""
    check_product(out, rows, tiles, weights)
    kernel, (_, width, depth), max_rank = load(), weights.a.shape, weights.b.shape[1]
    assert kernel is not None
    shrunk = torch.empty(len(tiles.rows), width, dtype=torch.float32)
    kernel.baton_add_adapters(
        BatonAdapters(
            rows.data_ptr(), weights.a.data_ptr(), weights.b.data_ptr(), weights.ranks.data_ptr(),
            tiles.rows.data_ptr(), tiles.tiles.data_ptr(), weights.blocks.data_ptr(), out.data_ptr(), shrunk.data_ptr(),
            len(tiles.tiles), len(weights.blocks), depth, out.shape[1], width // max_rank, max_rank,
            torch.get_num_threads(),
        ),
        rows.dtype is torch.float32,
    )  # fmt: skip


def join(gate_up: Tensor, width: int) -> Tensor:
    """[T, 2 W] bfloat16, panels of gate and up in turn |-> [T, width]: silu(gate) * up. Only where `load` finds it."""
    kernel, out = load(), torch.empty(len(gate_up), width, dtype=torch.bfloat16)
    padded = gate_up.shape[1] // 2
    if kernel is None or gate_up.dtype is not torch.bfloat16 or not gate_up.is_contiguous() or width > padded:
        raise ValueError(f"{gate_up.dtype} {tuple(gate_up.shape)} cannot be joined to {width} columns")
    kernel.baton_join(gate_up.data_ptr(), out.data_ptr(), len(out), padded, width, torch.get_num_threads())
    return out


@cache
def load() -> ctypes.CDLL | None:
    """The kernel; None without a compiler, which the choice of attention reports."""
    try:
        kernel = load_kernel("cpu_adapters")
    except BuildError:
        return None
    kernel.baton_add_adapters.argtypes = [ctypes.POINTER(BatonAdapters), ctypes.c_int]
    kernel.baton_join.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_int]
    kernel.baton_add_adapters.restype = kernel.baton_join.restype = None
    return kernel
