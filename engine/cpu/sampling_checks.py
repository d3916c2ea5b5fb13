"""Checks of a step's arrays, which kernels trust: in tests, and where BATON_CHECK_STEPS is set.

The arrays are our own. One that is wrong is a bug, which without the check reads or writes beyond them.
"""

import os

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import PARAMS

ARE_ON = bool(os.environ.get("BATON_CHECK_STEPS"))


def check_sampling(batch: SamplingBatch, logits: Tensor) -> None:
    """ValueError names the first field that does not fit `logits` [S, V]. Reads no value that only a GPU knows."""
    if logits.dim() != 2 or logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, expected contiguous float32 [S, V]")
    rows, vocabulary = logits.shape
    _check_array("params", batch.params, PARAMS, rows)
    _check_array("positions", batch.positions, np.int64, rows)
    if (counts := batch.counts) is not None:
        expected = (len(counts), vocabulary)
        is_good = counts.shape == expected and counts.dtype is torch.int32 and counts.is_contiguous()
        if not is_good or counts.device != logits.device:
            raise ValueError(
                f"counts are {counts.dtype} {tuple(counts.shape)} on {counts.device}, "
                f"expected contiguous int32 {expected} on {logits.device}"
            )
        _check_lines("counts_line", batch.counts_line, rows, len(counts))
    for name, starts, ids in (
        ("extra", batch.extra_starts, batch.extra_ids), ("bias", batch.bias_starts, batch.bias_ids)
    ):  # fmt: skip
        if starts is not None:
            _check_ragged(name, starts, ids, logits)
    if batch.bias_ids is not None:
        _check_array("bias_values", batch.bias_values, np.float32, len(batch.bias_ids))
    if batch.masks is not None:
        _check_array("masks", batch.masks, np.int32, len(batch.masks), -(-vocabulary // 32))
        _check_lines("mask_line", batch.mask_line, rows, len(batch.masks))


def _check_array(name: str, array: NDArray[np.generic] | None, dtype: DTypeLike, *shape: int) -> None:
    if array is None:
        raise ValueError(f"{name} is missing")
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        expected = f"contiguous {np.dtype(dtype)} {shape}"
        raise ValueError(f"{name} has shape {array.shape} of {array.dtype}, expected {expected}")


def check_range(name: str, values: NDArray[np.integer], low: int, high: int) -> None:
    wrong = values[(values < low) | (values >= high)]
    if wrong.size:
        raise ValueError(f"{name} holds {wrong[0]}, expected {low} to {high - 1}")


def _check_lines(name: str, lines: NDArray[np.int32] | None, rows: int, num_lines: int) -> None:
    _check_array(name, lines, np.int32, rows)
    assert lines is not None
    check_range(name, lines, -1, num_lines)


def _check_ragged(name: str, starts: NDArray[np.int32], ids: NDArray[np.int32] | Tensor | None, logits: Tensor) -> None:
    _check_array(f"{name}_starts", starts, np.int32, logits.shape[0] + 1)
    if isinstance(ids, Tensor):
        if ids.dtype is not torch.int32 or ids.shape != (starts[-1],) or ids.device != logits.device:
            expected = f"int32 {(int(starts[-1]),)} on {logits.device}"
            raise ValueError(f"{name}_ids are {ids.dtype} {tuple(ids.shape)} on {ids.device}, expected {expected}")
    else:
        _check_array(f"{name}_ids", ids, np.int32, 0 if ids is None else len(ids))
        assert ids is not None
        check_range(f"{name}_ids", ids, 0, logits.shape[1])
    if starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 0).any():
        raise ValueError(f"{name}_starts do not rise from 0 to {len(ids)}")
