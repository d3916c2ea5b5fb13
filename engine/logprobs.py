"""Log-probabilities of tokens, as the model itself gives them: before penalties, temperature and filters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.choice import TokenLogprobs


def tell_logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """[R, V] float32, R tokens, R numbers of likeliest tokens to tell (at most V are told)."""
    found = []
    for row, token, count in zip(torch.log_softmax(logits, -1), tokens, num_top, strict=True):
        ids = row.sort(descending=True, stable=True).indices[:count]
        found.append(TokenLogprobs(float(row[token]), tuple(ids.tolist()), tuple(row[ids].tolist())))
    return found
