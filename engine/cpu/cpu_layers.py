"""Elementwise work of a decoder in bfloat16 on a CPU, by cpu_layers.cpp."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.cpu.build import BuildError, load_kernel

BF16 = torch.bfloat16


def norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, [T, H]. See `fits`."""
    return _norm(None, rows, weight, eps)


def add_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `hidden` in place, contiguous float32; returns the RMSNorm of the sum, [T, H]. See `fits`."""
    return _norm(hidden, delta, weight, eps)


def _norm(hidden: Tensor | None, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    kernel, out = load(), torch.empty_like(rows)
    assert kernel is not None
    kernel.baton_norm(
        None if hidden is None else hidden.data_ptr(), rows.data_ptr(), weight.data_ptr(), out.data_ptr(),
        *rows.shape, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def apply_rope(query_key: Tensor, cos: Tensor, signed_sin: Tensor, norm: Tensor | None, eps: float) -> bool:
    """Norm and rotate query and key heads [T, N, D] in place; see attention.qkv.RopeArgs. False: cannot, untouched."""
    kernel = load()
    if kernel is None or not _can_turn(query_key, cos, signed_sin, norm):
        return False
    kernel.baton_turn(
        query_key.data_ptr(), query_key.stride(0), cos.data_ptr(), signed_sin.data_ptr(),
        None if norm is None else norm.data_ptr(), *query_key.shape, eps, torch.get_num_threads(),
    )  # fmt: skip
    return True


def fits(rows: Tensor, weight: Tensor) -> bool:
    """Whether norms take them."""
    return (
        rows.dtype is BF16
        and weight.dtype is BF16
        and rows.dim() == 2
        and rows.shape[1:] == weight.shape
        and rows.is_contiguous()
        and weight.is_contiguous()
    )


def _can_turn(values: Tensor, cos: Tensor, signed_sin: Tensor, norm: Tensor | None) -> bool:
    num_tokens, num_heads, dim = values.shape
    tables = (cos, signed_sin)
    return (
        all(tensor.dtype is BF16 for tensor in (values, *tables))
        and values.stride()[1:] == (dim, 1)
        and all(table.shape == (num_tokens, 1, dim) and table.is_contiguous() for table in tables)
        and (norm is None or (norm.shape == (num_heads, dim) and norm.is_contiguous()))
        and (norm is None or norm.dtype is BF16)
    )


@cache
def load() -> ctypes.CDLL | None:
    """The kernel; None without a compiler, which the choice of attention reports."""
    try:
        kernel = load_kernel("cpu_layers")
    except BuildError:
        return None
    pointer, count, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    kernel.baton_norm.argtypes = [*[pointer] * 4, count, count, real, number]
    kernel.baton_turn.argtypes = [pointer, count, *[pointer] * 3, *[count] * 3, real, number]
    kernel.baton_norm.restype = kernel.baton_turn.restype = None
    return kernel
