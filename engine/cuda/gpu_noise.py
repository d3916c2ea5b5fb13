"""Gumbel noise inside Triton kernels, the same bits as engine/sampling/noise.py, keys included.

Knows words and ids; nothing of logits or batches. Callers inline all functions.
"""

import triton
import triton.language as tl

_UNIT = tl.constexpr(2.0**-32)
_BELOW_ONE = tl.constexpr(1 - 2.0**-24)


@triton.jit
def mix64(word):
    """uint64 -> uint64, as `noise.mix64`."""
    word += 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def mix32(words):
    """uint32 -> uint32, as `noise.mix32_`."""
    words = (words ^ (words >> 16)) * 0x7FEB352D
    words = (words ^ (words >> 15)) * 0x846CA68B
    return words ^ (words >> 16)


@triton.jit
def hash_ids(ids, seed, position):
    """[n] int32 token ids, int64 scalars -> [n] uint32: `noise.hash_ids` with the keys of `noise.build_keys`."""
    key = mix64(mix64(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64, bitcast=True))
    words = mix32(ids.to(tl.uint32, bitcast=True) ^ (key >> 32).to(tl.uint32))
    return mix32(words + key.to(tl.uint32))


@triton.jit
def gumbel_noise(ids, seed, position):
    """[n] int32 token ids, int64 scalars -> [n] float32, as `noise.gumbel_noise`.

    v is a multiple of 2^-33, so 1 - v is exact in float64, and log(1 - v) equals log1p(-v) except for the last bits.
    """
    words = hash_ids(ids, seed, position).to(tl.float32)
    uniform = tl.minimum((words + 0.5) * _UNIT, _BELOW_ONE)
    return (-tl.log(-tl.log(1.0 - uniform.to(tl.float64)))).to(tl.float32)
