"""Products of weights in few bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.formats.fp8 import Fp8Matrix
from engine.formats.groups import StoredGroups
from engine.formats.ops import FormatOps
from engine.layer_config import Activation
from engine.layers.linear import GatedInput

MAX_CODE = 127  # of 8 bits


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear(GatedInput):
    """W in e4m3. A float32 sum; see `FormatOps.multiply_fp8`."""

    weight: Fp8Matrix  # contiguous
    bias: Tensor | None  # [N] in the model's dtype
    ops: FormatOps

    def __call__(self, rows: Tensor) -> Tensor:
        return self.ops.multiply_fp8(rows, *self.weight, self.bias)

    def multiply_gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return self.ops.multiply_gated_fp8(gate_up, activation, *self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class GroupsLinear:
    """W in groups of 32 along K; see `FormatOps.multiply_groups`."""

    weight: StoredGroups
    bias: Tensor | None  # [N] in the model's dtype
    ops: FormatOps

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
