"""Draws tokens: temperature, filters, then noise."""

import torch
from torch import Tensor

from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import MOST
from engine.sampling.noise import build_keys, gumbel_noise


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
