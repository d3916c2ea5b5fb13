"""The norm of all queries together and of all keys together: of models whose `qk_norm` is "width" (OLMo 2)."""

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.ranks import Ranks


def norm_width_(qkv: Tensor, weight: Tensor, config: ModelConfig, ranks: Ranks) -> None:
    """RMSNorm over all ranks, in place. qkv: [T, (Hq + 2 Hkv) D], weight: [1, (Hq + Hkv) D]"""
    sizes = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
    parts = torch.split(qkv[:, : sum(sizes)], sizes, 1)  # [T, Hq D], [T, Hkv D]
    squares = torch.stack([part.float().square().mean(1) for part in parts], 1)  # [T, 2]
    if ranks.size > 1:  # ranks have equally many; shared KV heads count equally often
        squares = ranks.all_reduce_(squares) / ranks.size
    scale = torch.rsqrt(squares + config.rms_eps)  # [T, 2]
    for part, own_weight, own_scale in zip(parts, torch.split(weight[0], sizes), scale.unbind(1), strict=True):
        part.copy_(part.float() * own_scale[:, None] * own_weight.float())
