"""Small modules of transformers with random weights."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.layers.config import Routing

HIDDEN, WIDTH = 64, 24  # of rows and of experts


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def build(name: str, routing: Routing, dtype: torch.dtype = torch.float32) -> Any:
    """The class model:Class, which reads a config that answers for all models."""
    model, kind = name.split(":")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    built = getattr(module, kind)(
        SimpleNamespace(
            hidden_size=HIDDEN, intermediate_size=WIDTH, moe_intermediate_size=WIDTH, n_shared_experts=2,
            shared_expert_intermediate_size=40, hidden_act="silu", hidden_activation="gelu_pytorch_tanh",
            swiglu_alpha=1.702, swiglu_limit=7.0, router_jitter_noise=0.0, rms_norm_eps=1e-6,
            _experts_implementation="eager",
            num_experts=routing.num_experts, num_local_experts=routing.num_experts, num_experts_per_tok=routing.top_k,
            top_k_experts=routing.top_k, norm_topk_prob=routing.renormalise, n_group=routing.num_groups,
            topk_group=routing.top_groups, topk_method="group_limited_greedy" if routing.num_groups > 1 else "greedy",
            routed_scaling_factor=routing.scale, router_scaling_factor=routing.scale, moe_norm_min=1e-12,
            use_expert_bias=True, expert_selection_fn=routing.scoring,
        )
    )  # fmt: skip
    with torch.no_grad():
        for seed, (key, value) in enumerate([*built.named_parameters(), *built.named_buffers()]):
            value.copy_(randn(*value.shape, seed=seed) / 8 + ("scale" in key))
    return built.to(dtype)
