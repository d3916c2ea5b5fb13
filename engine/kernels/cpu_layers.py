"""Elementwise work of a decoder on a CPU: cpu_layers.cpp for bfloat16, torch for other dtypes."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.attention.qkv import Heads, Turn
from engine.kernels.build import BuildError, load_kernel
from engine.ops.base import Operations

BF16 = torch.bfloat16


class CpuOperations(Operations):
    """See `Operations`. `gate` is torch's: packed products have their own."""

    def __init__(self, kernel: ctypes.CDLL) -> None:
        self._kernel = kernel

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(rows, None, weight, eps) if _fits(rows, weight) else super().norm(rows, weight, eps)

    def add_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        if _fits(hidden, weight) and _fits(delta, weight) and len(delta) == len(hidden):
            return self._norm(hidden, delta, weight, eps)
        return super().add_norm_(hidden, delta, weight, eps)

    def _norm(self, rows: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(rows)
        self._kernel.baton_add_norm(
            rows.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), out.data_ptr(),
            *rows.shape, eps, torch.get_num_threads(),
        )  # fmt: skip
        return out


def turn(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Like `Heads.turned`, in place where possible."""
    kernel, values = load(), heads.query_key
    if heads.turn is None or kernel is None or not _can_turn(values, heads.turn):
        return heads.turned()
    norm = heads.turn.norm
    kernel.baton_turn(
        values.data_ptr(), values.stride(0), heads.turn.cos.data_ptr(), heads.turn.signed_sin.data_ptr(),
        None if norm is None else norm.data_ptr(), *values.shape, heads.turn.eps, torch.get_num_threads(),
    )  # fmt: skip
    return heads._replace(turn=None).turned()


def _fits(rows: Tensor, weight: Tensor) -> bool:
    return (
        rows.dtype is BF16
        and weight.dtype is BF16
        and rows.dim() == 2
        and rows.shape[1:] == weight.shape
        and rows.is_contiguous()
        and weight.is_contiguous()
    )


def _can_turn(values: Tensor, turn: Turn) -> bool:
    num_tokens, num_heads, dim = values.shape
    tables = (turn.cos, turn.signed_sin)
    return (
        all(tensor.dtype is BF16 for tensor in (values, *tables))
        and values.stride()[1:] == (dim, 1)
        and all(table.shape == (num_tokens, 1, dim) and table.is_contiguous() for table in tables)
        and (turn.norm is None or (turn.norm.shape == (num_heads, dim) and turn.norm.is_contiguous()))
        and (turn.norm is None or turn.norm.dtype is BF16)
    )


def choose() -> Operations:
    """The kernel's operations if there is a compiler, else torch's."""
    kernel = load()
    return Operations() if kernel is None else CpuOperations(kernel)


@cache
def load() -> ctypes.CDLL | None:
    """The kernel; None without a compiler, which the choice of attention reports."""
    try:
        kernel = load_kernel("cpu_layers")
    except BuildError:
        return None
    pointer, count, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    kernel.baton_add_norm.argtypes = [*[pointer] * 4, count, count, real, number]
    kernel.baton_turn.argtypes = [pointer, count, *[pointer] * 3, *[count] * 3, real, number]
    kernel.baton_add_norm.restype = kernel.baton_turn.restype = None
    return kernel
