"""Products that own the memory layout of their weights, and tables of embeddings. Models never see the layout."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Batch
from engine.layer_config import Activation
from engine.ops.base import Ops, multiply_widened
from engine.ranks import Ranks
from wire.names import Quantization as Quantization

ProductKey = tuple[int, str]  # layer, name of the product in its table


class Linear(Protocol):
    """y = x W^T + b in some layout of W: [N, K]. Weights are never written."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [T, K] in the model's dtype |-> [T, N] in the same, contiguous."""
        ...


class Gated(Linear, Protocol):
    """A product of gate and up that joins them, in one step or in two."""

    @property
    def panel_columns(self) -> int:
        """Columns of the panels in which gate and up alternate in the result of `split`, see `interleave_panels`; 0:
        one after the other."""
        ...

    def split(self, rows: Tensor) -> Tensor:
        """[T, K] |-> [T, N]: gate and up before they are joined, in an order of its own."""
        ...

    def join(self, gate_up: Tensor) -> Tensor:
        """Result of `split` |-> [T, I]. May overwrite it."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A whole table."""

    weight: Tensor  # [V, H]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __len__(self) -> int:
        """Number of tokens that have a row here."""
        return len(self.weight)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 |-> [T, H]"""
        return functional.embedding(token_ids, self.weight)


class Additions:
    """Additions to a decoder's products: adapters (LoRA). This class adds nothing."""

    def __init__(self) -> None:
        self.num_slots = 0  # additions in steps at once

    def wrap(self, own: Linear, key: ProductKey, depth: int, part_sizes: Sequence[int]) -> Linear:
        """A product [N, depth] with what may be added to it. part_sizes: columns of each part, N in all."""
        return own

    def wrap_gated(self, own: Gated, key: ProductKey, depth: int, part_sizes: Sequence[int]) -> Gated | Linear:
        """The same for one that joins gate and up."""
        return own

    def during(self, batch: Batch) -> AbstractContextManager[None]:
        """Around a step."""
        return nullcontext()

    def keep_outputs(self) -> None:
        """From here on the step's products get the rows with logits alone."""


NO_ADDITIONS = Additions()
