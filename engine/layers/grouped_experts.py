"""Experts with stacked weights: grouped products for many rows, a kernel that reads only chosen experts for few.

Shapes depend on the number of rows alone and nothing waits for the GPU, so that steps can be recorded as CUDA graphs.
The GPU paths have not run on a card yet.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.activation import activate
from engine.layers.moe_config import Activation


class GroupedExperts:
    """See `Experts`. A row's experts are added in the order of its ids.

    On a GPU a row of at most MAX_ROWS has the same bits whatever the others are. In more rows, and on CPUs, its
    products are those of torch, whose blocking depends on how many rows share an expert.
    """

    __slots__ = ("_activation", "_down", "_down_bias", "_gate_up", "_gate_up_bias", "_kernels")

    def __init__(
        self, gate_up: Tensor, down: Tensor, activation: Activation = "silu",
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, kernels: Any = None,
    ) -> None:  # fmt: skip
        """gate_up: [E, 2 I, H], each expert's gate before its up; down: [E, H, I]; gate_up_bias: [E, 2 I]; down_bias:
        [E, H]. All of one dtype and contiguous. On a GPU bfloat16 with H and I multiples of 8: torch multiplies other
        groups one by one and waits for their sizes. kernels: the module kernels.gpu_experts, where there is Triton.
        """
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._gate_up_bias = gate_up_bias
        self._down_bias = down_bias
        self._kernels = kernels

    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self._kernels is not None and len(rows) <= self._kernels.MAX_ROWS:
            mixed: Tensor = self._kernels.mix(
                rows, ids, weights, self._gate_up, self._down, self._activation, self._gate_up_bias, self._down_bias
            )
            return mixed
        experts, order = ids.flatten().sort(stable=True)  # [T k] each: by expert, then by row
        all_experts = torch.arange(len(self._down), device=ids.device)
        ends = torch.searchsorted(experts, all_experts, right=True, out_int32=True)  # [E]: where each group ends
        gate_up = _multiply(rows[order // ids.shape[1]], self._gate_up, self._gate_up_bias, experts, ends)  # [T k, 2 I]
        gate, up = gate_up.chunk(2, dim=-1)
        gated = activate(gate, up, self._activation)  # [T k, I]
        outputs = _multiply(gated, self._down, self._down_bias, experts, ends)  # [T k, H]
        add_up = add_slots if self._kernels is None else self._kernels.add_slots
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        total: Tensor = add_up(outputs, weights, places, rows.dtype)
        return total


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, ends: Tensor) -> Tensor:
    """rows: [S, K], by expert; weight: [E, N, K] |-> [S, N]"""
    product = functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return product if bias is None else product.add_(bias[experts])


def add_slots(outputs: Tensor, weights: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Row t's sum over s of weights[t, s] * outputs[places[t k + s]], in float32; the slow twin of the kernel.

    outputs: [T k, H], weights: [T, k] float32, places: [T k] int64 |-> [T, H] in `dtype`
    """
    by_slot = outputs[places].view(*weights.shape, outputs.shape[1])  # [T, k, H]
    total = torch.zeros(len(weights), outputs.shape[1], dtype=torch.float32, device=outputs.device)
    for slot in range(weights.shape[1]):
        total += by_slot[:, slot] * weights[:, slot, None]
    return total.to(dtype)
