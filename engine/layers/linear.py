"""Linear layers that own the memory layout of their weights. Models call them and never see the layout."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.moe_config import Activation
from engine.ops.base import Ops
from engine.ranks import Ranks
from wire.names import Quantization as Quantization


class Linear(Protocol):
    """y = x W^T + b in some layout of W: [N, K]. Weights are never written."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [T, K] in the model's dtype |-> [T, N] in the same, contiguous."""
        ...


@runtime_checkable
class TakesGate(Protocol):
    """A `Linear` that may apply the gate while it reads its rows."""

    def multiply_gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up: [T, 2 K], see `Ops.gate` |-> [T, N]. May overwrite it."""
        ...


class SummedLinear:
    """A product, or experts, divided over ranks by inputs: the ranks' results are added."""

    __slots__ = ("_own", "_ranks")

    def __init__(self, own: Callable[..., Tensor], ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def __call__(self, rows: Tensor, *routes: Tensor) -> Tensor:
        return self._ranks.all_reduce_(self._own(rows, *routes))

    def add_norm_(self, hidden: Tensor, rows: Tensor, weight: Tensor, eps: float, ops: Ops) -> Tensor:
        """`Ops.add_norm_` of the layer's result, in one kernel with the ranks' sum where there is one."""
        return self._ranks.add_norm_(hidden, self._own(rows), weight, eps, ops.add_norm_)


class Normed:
    """A product, an MLP or experts, with norms of its own around it."""

    __slots__ = ("_after", "_before", "_eps", "_ops", "_own")

    def __init__(
        self, own: Callable[..., Tensor], ops: Ops, eps: float, before: Tensor, after: Tensor | None = None
    ) -> None:
        """before: [K], after: [N]"""
        self._own = own
        self._ops = ops
        self._eps = eps
        self._before = before
        self._after = after

    def __call__(self, rows: Tensor, *routes: Tensor) -> Tensor:
        """rows: [T, K] |-> [T, N]. Does not modify them."""
        out = self._own(self._ops.norm(rows, self._before, self._eps), *routes)
        return out if self._after is None else self._ops.norm(out, self._after, self._eps)


class Mlp:
    """Gate and up, then down."""

    __slots__ = ("_down", "_fused", "_gated")

    def __init__(self, gated: Linear, down: Linear) -> None:
        self._gated = gated
        self._down = down
        self._fused = (gated, down) if isinstance(gated, GatedLinear) and isinstance(down, TakesGate) else None

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] |-> [T, H]"""
        if self._fused is not None:
            gated, down = self._fused
            return down.multiply_gated(gated.gate_up(rows), gated.activation)
        return self._down(self._gated(rows))


class GatedLinear:
    """gate and up joined, where one product computes both, gate first."""

    __slots__ = ("_ops", "activation", "gate_up")

    def __init__(self, gate_up: Linear, ops: Ops, activation: Activation = "silu") -> None:
        self.gate_up = gate_up
        self._ops = ops
        self.activation = activation

    def __call__(self, rows: Tensor) -> Tensor:
        return self._ops.gate(self.gate_up(rows), self.activation)


class PlainLinear:
    """W row-major in the model's dtype, possibly a view of a read-only file mapping."""

    __slots__ = ("_bias", "_has_fast_row", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [N, K]; bias: [N] in the same dtype and on the same device, or None."""
        self._weight = weight
        self._bias = bias
        # For one row in half precision on the CPU, torch's matrix-vector kernel reads weights 1.2 (bfloat16) to 2 times
        # (float16) as fast as its general product; both sum in float32.
        self._has_fast_row = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)

    def __call__(self, rows: Tensor) -> Tensor:
        if self._has_fast_row and rows.shape[0] == 1:
            return self._multiply_row(rows[0]).unsqueeze(0)
        return functional.linear(rows, self._weight, self._bias)

    def _multiply_row(self, row: Tensor) -> Tensor:
        """[K] |-> [N]"""
        return torch.mv(self._weight, row) if self._bias is None else torch.addmv(self._bias, self._weight, row)
