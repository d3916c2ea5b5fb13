"""Chooses each row's experts and their weights. Knows logits, not what experts compute.

The order of operations and the dtypes are those of transformers' routers, so that the same logits give the same bits.
"""

import torch
from torch import Tensor

from engine.layers.moe_config import Routing


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, expert_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits: [T, E] |-> ids [T, k] int64, by falling score, and weights [T, k] float32. Never waits for a GPU.

    bias: [E] added to scores for the choice only; expert_scale: [E] multiplies the chosen experts' weights (Gemma 4);
    dtype: what precision "rounded" rounds to, by default the logits' dtype.
    """
    wide = logits if routing.precision == "logits" else logits.float()
    scores = _score(wide, routing) if routing.scores_all else wide  # [T, E]
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        choice = _keep_best_groups(choice, routing)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if not routing.scores_all:
        weights = _score(weights, routing)
    if routing.renormalise:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + routing.epsilon if routing.epsilon else total)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    if routing.precision == "rounded":
        weights = weights.to(dtype or logits.dtype)
    return ids, weights.float()


def _score(logits: Tensor, routing: Routing) -> Tensor:
    return logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(dim=-1)


def _keep_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """[T, E] |-> [T, E] with -inf for experts outside the best groups."""
    group_size = routing.num_experts // routing.num_groups
    groups = choice.view(-1, routing.num_groups, group_size)  # [T, groups, E / groups]
    peaks = groups.topk(routing.group_peaks, dim=-1).values.sum(dim=-1)  # [T, groups]
    best = peaks.topk(routing.top_groups, dim=-1).indices
    is_kept = torch.zeros_like(peaks, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_kept[:, :, None], float("-inf")).flatten(1)
