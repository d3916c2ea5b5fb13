"""Samples the next token: argmax(filtered_logits / T + Gumbel(seed, position)).

The noise is counter-based (`noise.py`), so a token depends only on its own logits, parameters and position: not on the
batch, the worker, the device's generator or earlier draws.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.sampling import checks
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import MOST, PARAMS, SamplingTensors
from engine.sampling.logits import NO_TOKEN, NOT_A_NUMBER, adjust_logits_
from engine.sampling.noise import build_keys, gumbel_noise
from wire.sampling import LEAST_TEMPERATURE

Choose = Callable[[Tensor, SamplingBatch], Tensor]
CHUNK_VALUES = 1 << 21  # logits sampled at once: bounds memory


def sample(logits: Tensor, batch: SamplingBatch, choose: Choose | None = None) -> Tensor:
    """[S, V] float32 -> [S] int64. May modify `logits`. choose: a kernel with the results of `sample_slowly`.

    First `adjust_logits_`. Below LEAST_TEMPERATURE the first of the largest logits wins. Otherwise temperature, then
    the filters (`keep_tokens`), then noise. Rows are independent. ValueError names, on the CPU, rows whose mask allows
    no token (`allowed_words` checks this earlier). On a GPU such a row's token is NO_TOKEN, and the host does not wait.
    Where the first logit is NaN it is NOT_A_NUMBER.
    """
    if checks.ARE_ON:
        checks.check_sampling(batch, logits)
    tokens = (choose or sample_slowly)(logits, batch)
    if batch.masks is not None and bool((tokens == NO_TOKEN).any()):
        raise ValueError(f"the masks of rows {(tokens == NO_TOKEN).nonzero()[:, 0].tolist()} allow no token")
    return tokens


def read_fields(fields: SamplingTensors) -> SamplingBatch:
    """On the CPU: a batch that shares the fields' memory."""
    arrays = {name: tensor.numpy() for name, tensor in fields._asdict().items()}
    begin, end = arrays["bias_starts"][[0, -1]]
    arrays["params"] = arrays["params"].view(PARAMS)[:, 0]
    arrays |= {name: arrays[name][begin:end] for name in ("bias_ids", "bias_values")}
    arrays["bias_starts"] = arrays["bias_starts"] - begin
    return SamplingBatch(**arrays | {"counts": fields.counts, "extra_starts": None, "extra_ids": None})


def sample_slowly(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """`sample` with torch operations, on any device; NO_TOKEN for a row whose mask allows no token."""
    is_nan = logits[:, 0].isnan()
    adjust_logits_(logits, batch)
    maxima, tokens = logits.max(-1)
    drawn = torch.from_numpy(batch.params["temperature"] >= LEAST_TEMPERATURE).nonzero()[:, 0]
    for rows in torch.split(drawn, max(1, CHUNK_VALUES // logits.shape[1])) if len(drawn) else ():
        tokens[rows] = _draw(logits, maxima, batch, rows)
    return torch.where(is_nan, NOT_A_NUMBER, torch.where(maxima > -torch.inf, tokens, NO_TOKEN))


def _draw(logits: Tensor, maxima: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
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
