"""Inputs of the sampling kernels: a batch on the device at fixed addresses."""

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.fields import PARAMS, ROW_FIELDS
from wire.sampling import SCALARS

_TORCH_TYPES = {"f4": torch.float32, "f8": torch.float64, "i8": torch.int64, "u8": torch.int64}


def to_bytes(params: NDArray[np.void]) -> NDArray[np.int8]:
    """[S] PARAMS -> [S, bytes of one], the same memory."""
    return params.view(np.int8).reshape(len(params), PARAMS.itemsize)


def _build_type() -> type[tuple[Tensor, ...]]:
    return namedtuple("ParamColumns", SCALARS)


_COLUMNS = [(_TORCH_TYPES[field[0].str[1:]], field[1] // field[0].itemsize) for field in (PARAMS.fields or {}).values()]
ParamColumns = _build_type()
"""A parameter |-> [S] of its type, strided; the bits of unsigned integers as signed ones."""


class SamplingTensors(NamedTuple):
    """The fields of a `SamplingBatch` on the device, all contiguous. A part that no row has: one element.

    Lines, ragged values and masks may be longer than needed, so that a CUDA graph can replay with other contents.
    """

    params: Tensor  # [S, bytes of PARAMS] int8
    positions: Tensor  # [S] int64
    counts: Tensor  # [k, V] int32
    counts_line: Tensor  # [S] int32
    extra_starts: Tensor  # [S + 1] int32
    extra_ids: Tensor  # [..] int32
    bias_starts: Tensor  # [S + 1] int32
    bias_ids: Tensor  # [..] int32
    bias_values: Tensor  # [..] float32
    masks: Tensor  # [m, ceil(V / 32)] int32
    mask_line: Tensor  # [S] int32

    def take(self, rows: slice) -> "SamplingTensors":
        """A contiguous range of the rows, as views: its ragged parts keep their offsets."""
        starts = slice(rows.start, rows.stop + 1)
        cut = {name: getattr(self, name)[rows] for name in ROW_FIELDS}
        return self._replace(**cut, extra_starts=self.extra_starts[starts], bias_starts=self.bias_starts[starts])

    def split(self) -> "SamplingTensors":
        """The same as kernels read it: `params` are ParamColumns, views of its bytes."""
        views = {dtype: self.params.view(dtype) for dtype in set(_TORCH_TYPES.values())}
        columns: Any = ParamColumns(*[views[dtype].select(1, at) for dtype, at in _COLUMNS])
        return self._replace(params=columns)
