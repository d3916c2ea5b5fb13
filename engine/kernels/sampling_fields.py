"""What the sampling kernels read: a batch on the device at fixed addresses, and constants shared with the host."""

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from torch import Tensor

SEEN_BIT = 1 << 30
"""In a token's count: set if the token is in the prompt or the answer. The lower bits count it in the answer."""

MOST = 1e30
"""Bounds for temperature and repetition penalty, as is 1 / MOST for the latter: float32 holds both."""

PARAMETERS: dict[str, DTypeLike] = {
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float64,
    "seeds": np.uint64,
    "positions": np.int64,
    "repetition": np.float32,
    "frequency": np.float32,
    "presence": np.float32,
}
DENSE_FIELDS = tuple(name for name in PARAMETERS if name != "positions")
ROW_FIELDS = (*PARAMETERS, "counts_line", "mask_line")


class SamplingTensors(NamedTuple):
    """The fields of a `SamplingBatch` on the device, all contiguous. A part that no row has: one element.

    Lines, ragged values and masks may be longer than needed, so that a CUDA graph can replay with other contents.
    """

    temperature: Tensor  # [S] float32
    top_k: Tensor  # [S] int64
    top_p: Tensor  # [S] float64
    min_p: Tensor  # [S] float64
    seeds: Tensor  # [S] int64, the bits of the unsigned seeds
    positions: Tensor  # [S] int64
    repetition: Tensor  # [S] float32
    frequency: Tensor  # [S] float32
    presence: Tensor  # [S] float32
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
