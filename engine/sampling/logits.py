"""Adjusts logits before sampling: penalties, bias, masks. The slow twin of cpu/cpu_sampling.cpp.

The order is fixed: repetition penalty, frequency and presence penalty, bias, then the mask. Only a row's own parameters
adjust it. Whatever the parameters and logits are, the result has no NaN and the mask wins.
"""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import MOST, SEEN_BIT

NO_TOKEN = -1  # in place of a token: the mask allows none
NOT_A_NUMBER = -2  # the same: the row's first logit is NaN, as all are if the hidden state is

TokenMask = NDArray[np.int32] | Tensor
"""[ceil(V / 32)] int32 on the CPU: bit t % 32 of word t // 32 is set |-> token t is allowed. xgrammar's layout."""


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


def can_choose(mask: TokenMask, vocabulary: int) -> bool:
    """Whether the mask allows any token below `vocabulary`. If not, its sequence cannot continue."""
    words = _to_words(mask, vocabulary)
    return bool(words[:-1].any()) or bool(int(words[-1]) & (1 << (vocabulary - 1) % 32 + 1) - 1)


def allowed_words(mask: TokenMask | None, forbidden: Collection[int], vocabulary: int) -> NDArray[np.int32] | None:
    """The mask without the forbidden tokens (min_tokens): [ceil(V / 32)]; None: all tokens. Does not modify it.

    If no token would be left, the forbidden ones stay allowed: min_tokens yields to a grammar that must end.
    ValueError if the mask has the wrong length or allows no token.
    """
    within = np.array([token for token in forbidden if token < vocabulary], np.int64)
    if mask is None and not len(within):
        return None
    words = np.full(-(-vocabulary // 32), -1, np.int32) if mask is None else _to_words(mask, vocabulary)
    if not can_choose(words, vocabulary):
        raise ValueError("the grammar's mask allows no token")
    left = words.copy()
    np.bitwise_and.at(left.view(np.uint32), within // 32, ~(np.uint32(1) << (within % 32).astype(np.uint32)))
    return left if can_choose(left, vocabulary) else words


def _to_words(mask: TokenMask, vocabulary: int) -> NDArray[np.int32]:
    words: NDArray[np.int32] = mask.numpy() if isinstance(mask, Tensor) else mask
    if words.shape != (-(-vocabulary // 32),) or words.dtype != np.int32:
        expected = f"{-(-vocabulary // 32)} of int32 for {vocabulary} tokens"
        raise ValueError(f"the mask has shape {words.shape} of {words.dtype}, expected {expected}")
    return words
