"""Layers with a state of each sequence on a CPU, by cpu_states.cpp. Tensors are named as in layers/recurrent.py."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.kernels.build import BuildError, load_kernel

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
    """See `Ops.gated_conv`. The layer `fits`."""
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
    """See `Ops.delta_net`. The layer `fits`; the last four are the states."""
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


def fits(rows: Tensor, taps: int, key_dim: int = 0) -> bool:
    """Whether the functions above take such rows and layers."""
    is_known = rows.dtype in (torch.float32, torch.bfloat16) and taps <= MOST_TAPS and key_dim <= MOST_KEYS
    return is_known and load() is not None


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
