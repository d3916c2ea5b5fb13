"""The input of sampling: each row's parameters, as arrays."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.fields import ROW_FIELDS


class SamplingBatch(NamedTuple):
    """S rows over a vocabulary of V tokens. Ragged parts, counts and masks are None where no row has any."""

    params: NDArray[np.void]  # [S] PARAMS; meanings: wire.sampling
    positions: NDArray[np.int64]  # [S] of the token to sample, in its sequence
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


RAGGED_FIELDS = (("extra_starts", "extra_ids"), ("bias_starts", "bias_ids", "bias_values"))
