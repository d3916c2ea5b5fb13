"""Layers with a state of each sequence on a CPU, by cpu_states.cpp. Tensors are named as in hybrids/recurrent.py."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from engine.cpu.build import BuildError, load_kernel

MOST_TAPS, MOST_KEYS = 8, 256  # kMostTaps, kMostKeys of cpu_states.cpp: its scratch is on the stack


class _Sequences(ctypes.Structure):
    """struct BatonSequences of cpu_states.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("sources", "targets", "starts")),
        ("count", ctypes.c_int64),
    ]


class _States(ctypes.Structure):
    """struct BatonStates of cpu_states.cpp."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride", "num_heads", "head_dim")),
    ]


class _Rows(ctypes.Structure):
    """struct BatonRows of cpu_states.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "out")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("is_bfloat16", "num_threads")),
    ]


class _DeltaNet(ctypes.Structure):
    """struct BatonDeltaNet of cpu_states.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("conv", "decay_rate", "dt_bias", "norm")),
        *((name, ctypes.c_int64) for name in ("taps", "value_dim")),
        ("eps", ctypes.c_float),
    ]


def gated_conv(
    rows: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, targets: Tensor, starts: Tensor, states: Tensor
) -> Tensor:
    """See `RecurrentOps.gated_conv`. `fits_gated_conv` took them."""
    kernel, out = load(), rows.new_empty(len(rows), len(weight))
    assert kernel is not None
    kernel.baton_gated_conv(
        _describe_rows(rows, out), _describe_sequences(sources, targets, starts), _describe_states(states),
        weight.data_ptr(), None if bias is None else bias.data_ptr(), weight.shape[1],
    )  # fmt: skip
    return out


def delta_net(
    rows: Tensor, conv: Tensor, decay_rate: Tensor, dt_bias: Tensor, norm: Tensor, eps: float,
    sources: Tensor, targets: Tensor, starts: Tensor, query: Tensor, key: Tensor, value: Tensor, memory: Tensor,
) -> Tensor:  # fmt: skip
    """See `RecurrentOps.delta_net`. `fits_delta_net` took them; the last four are the states."""
    kernel, out = load(), rows.new_empty(len(rows), value.shape[1] * value.shape[2])
    assert kernel is not None
    mixed = torch.empty(len(rows), len(conv), dtype=torch.float32)
    weights = (tensor.data_ptr() for tensor in (conv, decay_rate, dt_bias, norm))
    kernel.baton_delta_net(
        _describe_rows(rows, out), _describe_sequences(sources, targets, starts),
        _DeltaNet(*weights, conv.shape[1], len(norm), eps), _describe_states(query, key, value, memory),
        mixed.data_ptr(),
    )  # fmt: skip
    return out


def _describe_rows(rows: Tensor, out: Tensor) -> _Rows:
    is_bfloat16 = rows.dtype is torch.bfloat16
    return _Rows(rows.data_ptr(), out.data_ptr(), rows.stride(0), is_bfloat16, torch.get_num_threads())


def _describe_sequences(sources: Tensor, targets: Tensor, starts: Tensor) -> _Sequences:
    return _Sequences(sources.data_ptr(), targets.data_ptr(), starts.data_ptr(), len(sources))


def _describe_states(*states: Tensor) -> ctypes.Array[_States]:
    described = (_States(one.data_ptr(), *one.stride()[:2], *one.shape[1:3]) for one in states)
    return (_States * len(states))(*described)


def fits_gated_conv(
    rows: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, targets: Tensor, starts: Tensor, states: Tensor
) -> bool:
    """Whether `gated_conv` takes them."""
    weights = [weight] if bias is None else [weight, bias]
    return _fits(rows, 3 * len(weight), weights, (sources, targets, starts), [states]) and _fit_taps(weight, [states])


def fits_delta_net(
    rows: Tensor, conv: Tensor, decay_rate: Tensor, dt_bias: Tensor, norm: Tensor, eps: float,
    sources: Tensor, targets: Tensor, starts: Tensor, query: Tensor, key: Tensor, value: Tensor, memory: Tensor,
) -> bool:  # fmt: skip
    """Whether `delta_net` takes them."""
    num_heads, key_dim, value_dim = memory.shape[1:]
    weights, states = [conv, decay_rate, dt_bias, norm], [query, key, value, memory]
    return (
        _fits(rows, len(conv) + (value_dim + 2) * num_heads, weights, (sources, targets, starts), states)
        and _fit_taps(conv, states[:3])
        and query.shape == key.shape
        and num_heads % query.shape[1] == 0
        and query.shape[2] == key_dim <= MOST_KEYS
        and value.shape[1:3] == (num_heads, value_dim)
        and (len(decay_rate), len(dt_bias), len(norm)) == (num_heads, num_heads, value_dim)
    )


def _fits(rows: Tensor, width: int, weights: Sequence[Tensor], at: Sequence[Tensor], states: Sequence[Tensor]) -> bool:
    """Types and strides. at: the first three of `StateRows`."""
    return (
        load() is not None
        and rows.dtype in (torch.float32, torch.bfloat16)
        and rows.shape[1:] == (width,)
        and rows.stride(1) == 1
        and all(weight.dtype is torch.float32 and weight.is_contiguous() for weight in weights)
        and [tensor.dtype for tensor in at] == [torch.int64, torch.int64, torch.int32]
        and [len(tensor) for tensor in at] == [len(at[0]), len(at[0]), len(at[0]) + 1]
        and all(tensor.is_contiguous() for tensor in at)
        and all(one.dtype is torch.float32 and one.stride()[2:] == (one.shape[3], 1) for one in states)
    )


def _fit_taps(weight: Tensor, states: Sequence[Tensor]) -> bool:
    num_channels, taps = weight.shape
    return (
        taps <= MOST_TAPS
        and sum(one.shape[1] * one.shape[2] for one in states) == num_channels
        and all(one.shape[3] == taps - 1 for one in states)
    )


@cache
def load() -> ctypes.CDLL | None:
    """The kernel; None without a compiler, which the choice of attention reports."""
    try:
        kernel = load_kernel("cpu_states")
    except BuildError:
        return None
    rows, sequences, states = map(ctypes.POINTER, (_Rows, _Sequences, _States))
    pointer = ctypes.c_void_p
    kernel.baton_gated_conv.argtypes = [rows, sequences, states, pointer, pointer, ctypes.c_int64]
    kernel.baton_delta_net.argtypes = [rows, sequences, ctypes.POINTER(_DeltaNet), states, pointer]
    kernel.baton_gated_conv.restype = kernel.baton_delta_net.restype = None
    return kernel
