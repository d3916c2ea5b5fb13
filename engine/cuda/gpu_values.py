"""A row's filters and scaled values inside Triton kernels: its k-th largest value, and the mass of the largest.

Knows one row, and values that `gpu_logits.adjust` has adjusted; nothing of noise or of other rows. Scaled is
(value - maximum) / temperature, at most 0; the mass of a token is e^scaled.
"""

import triton
import triton.language as tl

from engine.cuda.gpu_logits import INFINITY, bound, load_param
from engine.sampling.fields import MOST

CHUNK = tl.constexpr(2048)  # values per iteration of a search
_MOST = tl.constexpr(MOST)


@triton.jit
def load_top_k(fields, row, vocabulary):
    """0 if it excludes nothing."""
    top_k = load_param(fields.params.top_k, row)
    return tl.where(top_k < vocabulary, top_k, 0)


@triton.jit
def load_temperature(fields, row):
    return tl.minimum(load_param(fields.params.temperature, row), _MOST)


@triton.jit
def load_min_p(fields, row):
    """The scaled value below which min_p excludes all."""
    return tl.log(load_param(fields.params.min_p, row)).to(tl.float32)


@triton.jit
def scale(values, least, top, temperature):
    """[n] adjusted values, `least` from `open_row` -> [n], at most 0."""
    return tl.div_rn(bound(values, least) - top, temperature)


@triton.jit
def find_kth(values, count, k, least, top, temperature):
    """Pointer to `count` >= k adjusted values -> the k-th largest, scaled.

    For values <= 0 the bits without the sign rise as the value falls. The search fixes one byte after the other.
    """
    known = 0
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for begin in range(0, count, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            scaled = scale(tl.load(values + at, mask=at < count, other=0.0), least, top, temperature)
            bits = (scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> (24 - 8 * step)
            counts += tl.histogram(bits & 255, 256, (at < count) & (bits >> 8 == known))
        is_before = tl.cumsum(counts, 0) < k
        k -= tl.sum(tl.where(is_before, counts, 0), 0)
        known = known * 256 + tl.sum(is_before.to(tl.int32), 0)
    return -tl.cast(known, tl.float32, bitcast=True)


@triton.jit
def weigh(values, count, floor, least, top, temperature):
    """Pointer to `count` adjusted values -> the mass of those from `floor` up, float64."""
    masses = tl.zeros([CHUNK], tl.float64)
    for begin in range(0, count, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        scaled = scale(tl.load(values + at, mask=at < count, other=-INFINITY), least, top, temperature)
        masses += tl.where((at < count) & (scaled >= floor), tl.exp(scaled.to(tl.float64)), 0.0)
    return tl.sum(masses, 0)
