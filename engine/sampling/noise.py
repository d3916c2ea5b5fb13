"""Draws tokens by counter-based Gumbel noise: a pure integer hash of (seed, position, token id), the same bits on every
device.

Changing any constant here changes every user's seeded output; tests pin the values.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import MOST

_U32 = (1 << 32) - 1


def draw(logits: Tensor, maxima: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """[S, V], [S], [R] rows that are not greedy -> [R] int64"""
    params = batch.params[rows.numpy()]

    def column(name: str) -> Tensor:
        return torch.from_numpy(params[name]).to(logits.device)

    scaled = (logits[rows] - maxima[rows, None]) / column("temperature").clamp(max=MOST)[:, None]
    keys = build_keys(params["seed"], batch.positions[rows.numpy()], logits.device)
    scores = scaled + gumbel_noise(torch.arange(logits.shape[1], device=logits.device), keys[:, None])
    if ((params["top_k"] > 0) | (params["top_p"] < 1) | (params["min_p"] > 0)).any():
        kept = keep_tokens(scaled, column("top_k"), column("top_p"), column("min_p"))
        scores.masked_fill_(~kept, -torch.inf)
    return scores.max(-1).indices


def keep_tokens(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """By sorting all tokens: the slow twin of the floors in cpu/cpu_sampling.cpp.

    [R, V] scaled logits with maxima 0, [R] int64, [R] float64, [R] float64 -> [R, V] bool, the tokens to keep.

    top_k keeps every token as likely as the k-th (ties included). top_p keeps, of those, the smallest set whose
    renormalised probability reaches p, at least one; among equals the lower id comes first. min_p keeps tokens at
    least min_p times as likely as the likeliest.
    """
    vocabulary = scaled.shape[1]
    values, ids = scaled.sort(descending=True, stable=True)
    last = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary) - 1
    is_kept = values >= values.gather(1, last[:, None])
    mass = values.double().exp_().mul_(is_kept).cumsum(1)
    num_before = (mass < top_p[:, None] * mass[:, -1:]).sum(1, keepdim=True)
    in_nucleus = torch.arange(vocabulary, device=scaled.device) <= num_before
    is_kept &= in_nucleus | (top_p == 1)[:, None]
    is_kept &= values >= min_p.log()[:, None].float()
    return torch.zeros_like(is_kept).scatter_(1, ids, is_kept)


def build_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64], device: torch.device) -> Tensor:
    """[R], [R] -> [R, 2] int32 on `device`: the two words that scramble token ids."""
    words = mix64(mix64(seeds) ^ positions.astype(np.uint64))
    halves = np.stack([words >> np.uint64(32), words & np.uint64(_U32)], -1)
    return torch.from_numpy(halves.astype(np.uint32).view(np.int32)).to(device)


def gumbel_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """[...] token ids, [..., 2] keys -> [...] float32 Gumbel(0, 1) noise: -log(-log1p(-v)) with v in (0, 1) float32.

    The largest noise decides. It comes from the smallest v, where float32 is finest. The logarithms are float64, so
    that rounding to float32 hides differences between devices.
    """
    words = hash_ids(ids, keys).to(torch.int64).bitwise_and_(_U32)
    uniform = (words.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)  # v = 1 would give noise -inf
    return uniform.double().neg_().log1p_().neg_().log_().neg_().float()


def hash_ids(ids: Tensor, keys: Tensor) -> Tensor:
    """[...] token ids, [..., 2] int32 keys -> [...] int32, whose 32 bits are the hash."""
    words = mix32_(ids.to(torch.int32) ^ keys[..., 0])
    return mix32_(words.add_(keys[..., 1]))


def mix32_(words: Tensor) -> Tensor:
    """Scramble int32 words in place by a bijection (Wellons' lowbias32). torch's int32 products wrap everywhere."""
    words ^= (words >> 16).bitwise_and_(0xFFFF)  # >> keeps the sign; the mask makes it a logical shift
    words *= 0x7FEB352D
    words ^= (words >> 15).bitwise_and_(0x1FFFF)
    words *= 0x846CA68B - (1 << 32)
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble words by a bijection (splitmix64), so that neighbouring seeds and positions are unrelated."""
    words = words + np.uint64(0x9E3779B97F4A7C15)  # numpy arrays wrap without a warning
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
