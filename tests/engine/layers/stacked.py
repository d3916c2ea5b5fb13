"""Random experts, computed in every way that the engine has."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import gpu_experts
from engine.layers.config import Activation
from engine.layers.moe import BucketedExperts, Expert, Experts, GroupedExperts
from engine.ops.base import activate
from tests.engine.layers.families import HIDDEN, WIDTH, randn

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
