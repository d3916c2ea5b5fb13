"""Log-probabilities of tokens, as the model itself gives them: before penalties, temperature and filters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.blocks import build_blocks, find_largest
from engine.choice import TokenLogprobs

Likeliest = tuple[tuple[int, ...], tuple[float, ...]]  # ids and their log-probabilities, likeliest first


def tell_logprobs(logprobs: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """[R, V] log_softmax of logits, R tokens, R numbers of likeliest tokens to tell as well (at most V are told)."""
    ids = torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)
    own = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    return [TokenLogprobs(one, *top) for one, top in zip(own, find_top(logprobs, num_top), strict=True)]


def find_top(logprobs: Tensor, num_top: Sequence[int]) -> list[Likeliest]:
    """[R, V], R counts -> each row's likeliest tokens, the lower id first among equals."""
    counts = [min(count, logprobs.shape[1]) for count in num_top]
    num_found = min(1 + max(counts, default=0), logprobs.shape[1])  # one more shows whether the last has equals
    if num_found <= 1 and not any(counts):
        return [((), ())] * len(counts)
    values, ids = (part.tolist() for part in find_largest(build_blocks(logprobs), num_found))
    return [
        _find_top_slowly(logprobs[row], count)
        if 0 < count < num_found and values[row][count - 1] == values[row][count]
        else _sort(ids[row][:count], values[row][:count])
        for row, count in enumerate(counts)
    ]


def _sort(ids: list[int], values: list[float]) -> Likeliest:
    pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(token for token, _ in pairs), tuple(value for _, value in pairs)


def _find_top_slowly(row: Tensor, count: int) -> Likeliest:
    """[V] -> the same whatever equals there are: looks at all that are as likely as the last."""
    ids = (row >= row.topk(count).values[-1]).nonzero()[:, 0]
    ids = ids[row[ids].sort(descending=True, stable=True).indices[:count]]
    return tuple(ids.tolist()), tuple(row[ids].tolist())
