"""A row's sampling parameters as kernels read them, and constants shared with the host."""

import numpy as np
from numpy.typing import DTypeLike

from wire.sampling import SCALARS, SamplingParams

SEEN_BIT = 1 << 30
"""In a token's count: set if the token is in the prompt or the answer. The lower bits count it in the answer."""

MOST = 1e30
"""Bounds for temperature and repetition penalty, as is 1 / MOST for the latter: float32 holds both."""

PARAMS = np.dtype([(name, scalar.dtype) for name, scalar in SCALARS.items()], align=True)
"""A row's parameters: `struct Params` of cpu_sampling.cpp."""

ROW_FIELDS = ("params", "positions", "counts_line", "mask_line")


def _limits(dtype: DTypeLike) -> tuple[float, float]:
    info = np.finfo(dtype) if np.dtype(dtype).kind == "f" else np.iinfo(dtype)
    least, most = np.array([info.min, info.max], dtype).tolist()
    return least, most


_LIMITS = [(name, *_limits(scalar.dtype)) for name, scalar in SCALARS.items()]


def to_row(params: SamplingParams) -> tuple[float, ...]:
    """An element of an array of PARAMS. Values beyond their type become its largest."""
    return tuple([min(max(getattr(params, name), least), most) for name, least, most in _LIMITS])
