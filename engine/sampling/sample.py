"""Samples the next token: argmax(filtered_logits / T + Gumbel(seed, position)).

The noise is counter-based (noise.py), so a token depends only on its own logits, parameters and position: not on the
batch, the worker, the device's generator or earlier draws. The slow twin of cpu/cpu_sampling.cpp.

Logits are adjusted in a fixed order: repetition penalty, frequency and presence penalty, bias, then the mask. Only a
row's own parameters adjust it. Whatever the parameters and logits are, the result has no NaN and the mask wins.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import MOST, SEEN_BIT
from engine.sampling.noise import draw
from wire.sampling import LEAST_TEMPERATURE

NO_TOKEN = -1  # in place of a token: the mask allows none
NOT_A_NUMBER = -2  # the same: the row's first logit is NaN, as all are if the hidden state is

Choose = Callable[[Tensor, SamplingBatch], Tensor]
CHUNK_VALUES = 1 << 21  # logits sampled at once: bounds memory


def sample(logits: Tensor, batch: SamplingBatch, choose: Choose | None = None) -> Tensor:
    """[S, V] float32 -> [S] int64. May modify `logits`. choose: a kernel with the results of `sample_slowly`.

    First `adjust_logits_`. Below LEAST_TEMPERATURE the first of the largest logits wins. Otherwise temperature, then
    the filters (`keep_tokens`), then noise. Rows are independent. ValueError names, on the CPU, rows whose mask allows
    no token (`allowed_words` checks this earlier). On a GPU such a row's token is NO_TOKEN, and the host does not wait.
    Where the first logit is NaN it is NOT_A_NUMBER.
    """
    tokens = (choose or sample_slowly)(logits, batch)
    if batch.masks is not None and bool((tokens == NO_TOKEN).any()):
        raise ValueError(f"the masks of rows {(tokens == NO_TOKEN).nonzero()[:, 0].tolist()} allow no token")
    return tokens


def sample_slowly(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """`sample` with torch operations, on any device; NO_TOKEN for a row whose mask allows no token."""
    is_nan = logits[:, 0].isnan()
    adjust_logits_(logits, batch)
    maxima, tokens = logits.max(-1)
    drawn = torch.from_numpy(batch.params["temperature"] >= LEAST_TEMPERATURE).nonzero()[:, 0]
    for rows in torch.split(drawn, max(1, CHUNK_VALUES // logits.shape[1])) if len(drawn) else ():
        tokens[rows] = draw(logits, maxima, batch, rows)
    return torch.where(is_nan, NOT_A_NUMBER, torch.where(maxima > -torch.inf, tokens, NO_TOKEN))


def adjust_logits_(logits: Tensor, batch: SamplingBatch) -> None:
    """Change [S, V] float32 rows in place as a checked batch says.

    - repetition r: logits of tokens that the row has seen are divided by r if positive, else multiplied by r;
    - frequency f, presence p: a token that occurs n > 0 times in the answer loses f n + p;
    - bias is added;
    - NaN and values below the float range become the lowest number, values above it the highest;
    - masked tokens become -inf, so that every allowed token beats them.
    """
    _penalise_(logits, batch)
    if batch.bias_starts is not None and batch.bias_ids is not None and batch.bias_values is not None:
        places = _flat_places(batch.bias_starts, batch.bias_ids, logits)
        logits.view(-1).index_add_(0, places, torch.from_numpy(batch.bias_values).to(logits.device))
    most = torch.finfo(torch.float32).max
    logits.nan_to_num_(-most, most, -most)
    if batch.masks is not None and batch.mask_line is not None:
        masked = np.flatnonzero(batch.mask_line >= 0)
        words = torch.from_numpy(batch.masks[batch.mask_line[masked]]).to(logits.device)  # [k, ceil(V / 32)]
        bits = words[:, :, None] >> torch.arange(32, device=logits.device) & 1
        logits[masked] = logits[masked].masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def _penalise_(logits: Tensor, batch: SamplingBatch) -> None:
    asked = [batch.params[name] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")]
    rows = np.flatnonzero((asked[0] != 1) | (asked[1] != 0) | (asked[2] != 0))
    if not len(rows):
        return
    repetition, frequency, presence = [torch.from_numpy(one[rows]).to(logits.device)[:, None] for one in asked]

    counts = _count(logits, batch)[rows]
    num_answer = counts & (SEEN_BIT - 1)
    values = logits[rows]
    penalty = repetition.clamp(1 / MOST, MOST)
    values = torch.where(counts > 0, torch.where(values > 0, values / penalty, values * penalty), values)
    loss = frequency.double() * num_answer + presence
    logits[rows] = torch.where(num_answer > 0, (values.double() - loss).float(), values)


def _count(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[S, V] int32, each row's counts including its extra tokens."""
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    if batch.counts is not None and batch.counts_line is not None:
        rows = np.flatnonzero(batch.counts_line >= 0)
        counts[rows] = batch.counts[torch.from_numpy(batch.counts_line[rows]).to(logits.device)]
    if batch.extra_starts is not None and batch.extra_ids is not None:
        places = _flat_places(batch.extra_starts, batch.extra_ids, logits)
        counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    return counts


def _flat_places(starts: NDArray[np.int32], ids: NDArray[np.int32] | Tensor, logits: Tensor) -> Tensor:
    """[S + 1], [n] -> [n] int64: the places of each row's ids in the flattened logits."""
    begins = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) * logits.shape[1]
    return torch.from_numpy(begins).to(logits.device) + torch.as_tensor(ids, device=logits.device)
