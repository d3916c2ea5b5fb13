"""Linear layers that own the memory layout of their weights. Models call them and never see the layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.adapters.rows import AdapterTiles, AdapterWeights
from engine.formats.fp8 import Fp8Matrix
from engine.formats.groups import StoredGroups
from engine.layers.config import Activation
from engine.ops.base import Ops, multiply_widened
from engine.ranks import Ranks
from wire.names import Quantization as Quantization

MAX_CODE = 127  # of 8 bits


class Linear(Protocol):
    """y = x W^T + b in some layout of W: [N, K]. Weights are never written."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [T, K] in the model's dtype |-> [T, N] in the same, contiguous."""
        ...


@dataclass(slots=True, eq=False)
class AdaptersStep:
    """What products with adapters need to know of the step that runs. See `layers.adapters`."""

    tiles: AdapterTiles | None = None  # of the rows that they get now; None: none has an adapter
    outputs: AdapterTiles | None = None  # the same of rows with logits


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """The adapters (LoRA) of one product, in all slots."""

    weights: AdapterWeights
    step: AdaptersStep
    ops: Ops
    is_panelled: bool  # its columns are two parts in panels that alternate

    @property
    def is_idle(self) -> bool:
        return self.step.tiles is None

    def add_(self, out: Tensor, rows: Tensor) -> Tensor:
        """out: [T, N], the product of rows [T, K]; changed in place and returned."""
        if self.step.tiles is not None:
            self.ops.add_adapters_(out, rows.contiguous(), self.step.tiles, self.weights)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLinear:
    """A product whose rows may have adapters: y = x W^T + b + B A x."""

    own: Linear
    site: Site

    def __call__(self, rows: Tensor) -> Tensor:
        return self.site.add_(self.own(rows), rows)


class Gated(Linear, Protocol):
    """A product of gate and up that joins them, in one step or in two."""

    def split(self, rows: Tensor) -> Tensor:
        """[T, K] |-> [T, N]: gate and up before they are joined, in an order of its own."""
        ...

    def join(self, gate_up: Tensor) -> Tensor:
        """What `split` returned |-> [T, I]. May overwrite it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedGated:
    """The same for a product that joins gate and up."""

    own: Gated
    site: Site

    def __call__(self, rows: Tensor) -> Tensor:
        if self.site.is_idle:
            return self.own(rows)
        return self.own.join(self.site.add_(self.own.split(rows), rows))


def without_adapters(linear: Linear) -> Linear:
    """The product alone, if the step has no adapters; else itself."""
    return linear.own if isinstance(linear, AdaptedLinear | AdaptedGated) and linear.site.is_idle else linear


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
        gated, down = without_adapters(self.gated), without_adapters(self.down)
        if isinstance(gated, GatedLinear) and isinstance(down, Fp8Linear):
            return down.multiply_gated(gated.gate_up(rows), gated.activation)
        return down(gated(rows))


@dataclass(frozen=True, slots=True, eq=False)
class GatedLinear:
    """gate and up joined, where one product computes both, gate first."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear:
    """W in e4m3. A float32 sum; see `Ops.multiply_fp8`."""

    weight: Fp8Matrix  # contiguous
    bias: Tensor | None  # [N] in the model's dtype
    ops: Ops

    def __call__(self, rows: Tensor) -> Tensor:
        return self.ops.multiply_fp8(rows, *self.weight, self.bias)

    def multiply_gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up: [T, 2 K], see `Ops.gate` |-> [T, N]. May overwrite it."""
        return self.ops.multiply_gated_fp8(gate_up, activation, *self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class GroupsLinear:
    """W in groups of 32 along K; see `Ops.multiply_groups`."""

    weight: StoredGroups
    bias: Tensor | None  # [N] in the model's dtype
    ops: Ops

    def __call__(self, rows: Tensor) -> Tensor:
        return self.ops.multiply_groups(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Linear:
    """In 8 bits, by torch: the slow twin of packed ones, and their fallback.

    y[t, n] = s[t] scale[n] * sum_k x[t, k] w[n, k] + b[n], of codes x and w: exact integers;
    returns bfloat16 or float32.
    """

    codes: Tensor  # [N, K] int8
    scale: Tensor  # [N, 1] float32, with the codes from `round_rows`
    bias: Tensor | None = None  # [N]
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, rows: Tensor) -> Tensor:
        codes, scale = round_rows(rows)
        sums = codes.double() @ self.codes.double().T  # [T, N]: integers, exact
        product = sums.float() * (self.scale.T * scale)
        return (product if self.bias is None else product.add_(self.bias)).to(self.dtype)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows: [T, K] |-> codes [T, K] int8, scale [T, 1] float32. The largest value of a row becomes 127 or -127."""
    scale = rows.abs().amax(dim=1, keepdim=True).float() / MAX_CODE  # [T, 1]
    factor = torch.where(scale > 0, 1 / scale, 0.0)
    return (rows.double() * factor.double()).round().to(torch.int8), scale  # rounded once, like the kernel
