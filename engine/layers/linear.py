"""Linear layers that own the memory layout of their weights. Models call them and never see the layout."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.layer_config import Activation
from engine.ops.base import Ops, multiply_widened
from engine.ranks import Ranks
from wire.names import Quantization as Quantization


class Linear(Protocol):
    """y = x W^T + b in some layout of W: [N, K]. Weights are never written."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [T, K] in the model's dtype |-> [T, N] in the same, contiguous."""
        ...


class Gated(Linear, Protocol):
    """A product of gate and up that joins them, in one step or in two."""

    @property
    def panel_columns(self) -> int:
        """What `split` gives has gate and up in panels of so many columns that alternate, see `interleave_panels`; 0:
        one after the other."""
        ...

    def split(self, rows: Tensor) -> Tensor:
        """[T, K] |-> [T, N]: gate and up before they are joined, in an order of its own."""
        ...

    def join(self, gate_up: Tensor) -> Tensor:
        """What `split` returned |-> [T, I]. May overwrite it."""
        ...


class Extended(ABC):
    """A product to which something is added in some steps."""

    own: Linear

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing is added in the step that runs."""


def bare(linear: Linear) -> Linear:
    """The product alone, if nothing is added to it in this step; else itself."""
    return linear.own if isinstance(linear, Extended) and linear.is_idle else linear


class GatedInput(ABC):
    """A product that can join gate and up itself, while it reads them."""

    @abstractmethod
    def multiply_gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up: [T, 2 K], see `Ops.gate` |-> [T, N]. May overwrite it."""


@dataclass(frozen=True, slots=True, eq=False)
class SummedLinear:
    """A product, or experts, divided over ranks by inputs: the ranks' results are added."""

    own: Callable[..., Tensor]
    ranks: Ranks

    def __call__(self, rows: Tensor, *routes: Tensor) -> Tensor:
        return self.ranks.all_reduce_(self.own(rows, *routes))

    def add_norm_(self, hidden: Tensor, rows: Tensor, weight: Tensor, eps: float, ops: Ops) -> Tensor:
        """`Ops.add_norm_` of the layer's result, in one kernel with the ranks' sum where there is one."""
        return self.ranks.add_norm_(hidden, self.own(rows), weight, eps, ops.add_norm_)


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """A product, an MLP or experts, with norms of its own around it."""

    own: Callable[..., Tensor]
    ops: Ops
    eps: float
    before: Tensor  # [K]
    after: Tensor | None = None  # [N]

    def __call__(self, rows: Tensor, *routes: Tensor) -> Tensor:
        """rows: [T, K] |-> [T, N]. Does not modify them."""
        out = self.own(self.ops.norm(rows, self.before, self.eps), *routes)
        return out if self.after is None else self.ops.norm(out, self.after, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """Gate and up, then down."""

    gated: Linear
    down: Linear

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] |-> [T, H]"""
        gated, down = bare(self.gated), bare(self.down)
        if isinstance(gated, GatedLinear) and isinstance(down, GatedInput):
            return down.multiply_gated(gated.gate_up(rows), gated.activation)
        return down(gated(rows))


@dataclass(frozen=True, slots=True, eq=False)
class GatedLinear:
    """gate and up joined, where one product computes both, gate first."""

    panel_columns: ClassVar[int] = 0

    gate_up: Linear
    ops: Ops
    activation: Activation = "silu"

    def __call__(self, rows: Tensor) -> Tensor:
        return self.join(self.split(rows))

    def split(self, rows: Tensor) -> Tensor:
        """[T, K] |-> [T, 2 I]"""
        return self.gate_up(rows)

    def join(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] |-> [T, I]. May overwrite it."""
        return self.ops.gate(gate_up, self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """W row-major in the model's dtype, possibly a view of a read-only file mapping."""

    weight: Tensor
    bias: Tensor | None = None  # [N] in the same dtype and on the same device

    def __call__(self, rows: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        # For one row in half precision on the CPU, torch's matrix-vector kernel reads weights 1.2 (bfloat16) to 2 times
        # (float16) as fast as its general product; both sum in float32.
        if len(rows) == 1 and weight.is_cpu and weight.dtype in (torch.bfloat16, torch.float16):
            row = rows[0]
            return (torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)).unsqueeze(0)
        return functional.linear(rows, weight, bias)


@dataclass(frozen=True, slots=True, eq=False)
class WidenedLinear:
    """y = x W^T summed and returned in float32. W: [N, K] row-major, possibly straight from a read-only mapping."""

    weight: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [S, K] in the dtype of the weights |-> [S, N] float32."""
        if self.weight.dtype is torch.float32:
            return functional.linear(rows, self.weight)
        if self.weight.is_cuda:
            return torch.mm(rows, self.weight.T, out_dtype=torch.float32)
        return multiply_widened(rows, self.weight)


def interleave_panels(parts: Sequence[Tensor], width: int) -> Tensor:
    """[n, ...] of each part |-> [N padded, ...]: their panels of `width`, the last of each padded by zeros, in turn."""
    padded = [functional.pad(part, (*(0, 0) * (part.dim() - 1), 0, -len(part) % width)) for part in parts]
    return torch.stack([part.view(-1, width, *part.shape[1:]) for part in padded], 1).flatten(0, 2)
