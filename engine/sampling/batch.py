"""The input of sampling: each row's parameters, as arrays, and their bounds."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from engine.sampling.fields import PARAMS, ROW_FIELDS


class SamplingBatch(NamedTuple):
    """S rows over a vocabulary of V tokens. Ragged parts, counts and masks are None where no row has any."""

    params: NDArray[np.void]  # [S] PARAMS; meanings: wire.sampling
    positions: NDArray[np.int64] | Tensor  # [S] of the token to sample, in its sequence; a tensor if only a GPU knows
    counts: Tensor | None = None  # [k, V] int32 on the logits' device, see SEEN_BIT
    counts_line: NDArray[np.int32] | None = None  # [S] line of `counts`; -1: only extra tokens count
    extra_starts: NDArray[np.int32] | None = None  # [S + 1] of extra_ids
    extra_ids: NDArray[np.int32] | Tensor | None = None  # [..] drafts: tokens of the answer that are not in `counts`
    bias_starts: NDArray[np.int32] | None = None  # [S + 1] of bias_ids and bias_values
    bias_ids: NDArray[np.int32] | None = None  # [..] unique within a row
    bias_values: NDArray[np.float32] | None = None  # [..]
    masks: NDArray[np.int32] | None = None  # [m, ceil(V / 32)] bit t % 32 of word t // 32 |-> whether t is allowed
    mask_line: NDArray[np.int32] | None = None  # [S] line of `masks`; -1: every token is allowed

    def take(self, rows: slice) -> "SamplingBatch":
        """A contiguous range of the rows."""
        per_row = {name: getattr(self, name)[rows] for name in ROW_FIELDS if getattr(self, name) is not None}
        ragged = {}
        for starts, *values in RAGGED_FIELDS:
            if (all_starts := getattr(self, starts)) is not None:
                own = all_starts[rows.start : rows.stop + 1]
                ragged[starts] = own - own[0]
                ragged |= {name: getattr(self, name)[own[0] : own[-1]] for name in values}
        return self._replace(**per_row, **ragged)

    def check(self, logits: Tensor) -> None:
        """ValueError names the first field that does not fit `logits` [S, V]."""
        if logits.dim() != 2 or logits.dtype is not torch.float32 or not logits.is_contiguous():
            raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, expected contiguous float32 [S, V]")
        rows, vocabulary = logits.shape
        _check("params", self.params, PARAMS, rows)
        if isinstance(self.positions, np.ndarray):
            _check("positions", self.positions, np.int64, rows)
        if self.counts is not None:
            self._check_counts(self.counts, logits)
            _check_lines("counts_line", self.counts_line, rows, self.counts.shape[0])
        if self.extra_starts is not None:
            _check_ragged("extra", self.extra_starts, self.extra_ids, logits)
        if self.bias_starts is not None:
            _check_ragged("bias", self.bias_starts, self.bias_ids, logits)
            _check("bias_values", self.bias_values, np.float32, len(_given("bias_ids", self.bias_ids)))
        if self.masks is not None:
            _check("masks", self.masks, np.int32, len(self.masks), -(-vocabulary // 32))
            _check_lines("mask_line", self.mask_line, rows, len(self.masks))

    @staticmethod
    def _check_counts(counts: Tensor, logits: Tensor) -> None:
        expected = (counts.shape[0], logits.shape[1])
        is_good = counts.shape == expected and counts.dtype is torch.int32 and counts.is_contiguous()
        if not is_good or counts.device != logits.device:
            raise ValueError(
                f"counts are {counts.dtype} {tuple(counts.shape)} on {counts.device}, "
                f"expected contiguous int32 {expected} on {logits.device}"
            )


RAGGED_FIELDS = (("extra_starts", "extra_ids"), ("bias_starts", "bias_ids", "bias_values"))


def _given(name: str, array: NDArray[np.generic] | None) -> NDArray[np.generic]:
    if array is None:
        raise ValueError(f"{name} is missing")
    return array


def _check(name: str, array: NDArray[np.generic] | None, dtype: DTypeLike, *shape: int) -> None:
    array = _given(name, array)
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        expected = f"contiguous {np.dtype(dtype)} {shape}"
        raise ValueError(f"{name} has shape {array.shape} of {array.dtype}, expected {expected}")


def _check_range(name: str, values: NDArray[np.int32], low: int, high: int) -> None:
    if values.size and not (values.min() >= low and values.max() < high):
        bad = values[(values < low) | (values >= high)][0]
        raise ValueError(f"{name} holds {bad}, expected {low} to {high - 1}")


def _check_lines(name: str, lines: NDArray[np.int32] | None, rows: int, num_lines: int) -> None:
    _check(name, lines, np.int32, rows)
    assert lines is not None
    _check_range(name, lines, -1, num_lines)


def _check_ragged(name: str, starts: NDArray[np.int32], ids: NDArray[np.int32] | Tensor | None, logits: Tensor) -> None:
    _check(f"{name}_starts", starts, np.int32, logits.shape[0] + 1)
    if ids is None:
        raise ValueError(f"{name}_ids is missing")
    if isinstance(ids, Tensor) and not ids.is_cpu:  # on the device; the host does not wait for them
        if ids.dtype is not torch.int32 or ids.shape != (starts[-1],) or ids.device != logits.device:
            expected = f"int32 {(int(starts[-1]),)} on {logits.device}"
            raise ValueError(f"{name}_ids are {ids.dtype} {tuple(ids.shape)} on {ids.device}, expected {expected}")
    else:
        array = np.asarray(ids)
        _check(f"{name}_ids", array, np.int32, len(array))
        _check_range(f"{name}_ids", array, 0, logits.shape[1])
    if starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 0).any():
        raise ValueError(f"{name}_starts do not rise from 0 to {len(ids)}")
