"""Small modules of transformers with random weights, and experts in each of our ways."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import gpu_experts
from engine.layers.config import Activation, Routing
from engine.layers.moe import BucketedExperts, Expert, Experts, GroupedExperts
from engine.ops.base import activate

HIDDEN, WIDTH = 64, 24  # of rows and of experts


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def build(name: str, routing: Routing, dtype: torch.dtype = torch.float32) -> Any:
    """The class model:Class, which reads a config that answers for all models."""
    model, kind = name.split(":")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    built = getattr(module, kind)(
        SimpleNamespace(
            hidden_size=HIDDEN, rms_norm_eps=1e-6, n_routed_experts=routing.num_experts,
            num_experts=routing.num_experts, num_local_experts=routing.num_experts, num_experts_per_tok=routing.top_k,
            top_k_experts=routing.top_k, norm_topk_prob=routing.renormalise, n_group=routing.num_groups,
            topk_group=routing.top_groups, routed_scaling_factor=routing.scale, use_expert_bias=True,
        )
    )  # fmt: skip
    with torch.no_grad():
        for seed, (key, value) in enumerate([*built.named_parameters(), *built.named_buffers()]):
            value.copy_(randn(*value.shape, seed=seed) / 8 + ("scale" in key))
    return built.to(dtype)


NUM_EXPERTS, TOP_K = 8, 3
WAYS = ("bucketed", "grouped", "kernels")  # kernels: interpreted
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass
class Stacked:
    """Weights of all experts, see `GroupedExperts`."""

    activation: Activation
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def to(self, there: torch.dtype | str) -> "Stacked":
        parts: dict[str, Any] = {name: part.to(there) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **parts)

    def make(self, way: str) -> Experts:
        if way == "bucketed":
            return self.bucketed(functional.linear)
        kernels = gpu_experts if way == "kernels" else None
        return GroupedExperts(self.gate_up, self.down, self.activation, self.gate_up_bias, self.down_bias, kernels)

    def bucketed(self, multiply: Multiply) -> BucketedExperts:
        def gated(expert: int, rows: Tensor) -> Tensor:
            bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
            gate, up = multiply(rows, self.gate_up[expert], bias).chunk(2, dim=-1)
            return activate(gate, up, self.activation)

        def down(expert: int, rows: Tensor) -> Tensor:
            return multiply(rows, self.down[expert], None if self.down_bias is None else self.down_bias[expert])

        return BucketedExperts([Expert(partial(gated, i), partial(down, i)) for i in range(len(self.down))])

    def loop(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same in float64, one row and expert after the other."""
        experts = self.to(torch.float64).bucketed(functional.linear).experts
        total = torch.zeros(rows.shape, dtype=torch.float64)
        for row, (own, by) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            for expert, weight in zip(own, by, strict=True):
                gated, down = experts[expert]
                total[row] += weight * down(gated(rows[row : row + 1].double()))[0]
        return total


def random_experts(activation: Activation, has_bias: bool, hidden: int = HIDDEN, width: int = WIDTH) -> Stacked:
    gate_up, down = randn(NUM_EXPERTS, 2 * width, hidden, seed=1) / 4, randn(NUM_EXPERTS, hidden, width, seed=2) / 4
    gate_up[-1] = float("nan")  # `choose` leaves it out
    biases = 3 * randn(NUM_EXPERTS, 2 * width, seed=3), randn(NUM_EXPERTS, hidden, seed=4)
    return Stacked(activation, gate_up, down, *(biases if has_bias else ()))


def choose(num_rows: int) -> tuple[Tensor, Tensor]:
    """[T, k] each: ids, never that of the last expert, and weights."""
    ids = randn(num_rows, NUM_EXPERTS - 1, seed=7).topk(TOP_K).indices
    return ids, randn(num_rows, TOP_K, seed=8).softmax(-1)
