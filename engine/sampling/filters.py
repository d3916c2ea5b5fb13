"""top_k, top_p and min_p by sorting all tokens: the slow twin of the floors in kernels/cpu_sampling.cpp."""

import torch
from torch import Tensor


def keep_tokens(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[R, V] scaled logits with maxima 0, [R] int64, [R] float64, [R] float64 -> [R, V] bool, the tokens to keep.

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
