"""Products in float32 by oneDNN, which comes with torch. torch itself calls MKL, which leaves AVX-512 alone on AMD's
CPUs and takes 1.5 to 3 times as long there (Zen 5, 1 to 2,048 rows), and 1 to 1.8 times as long with AVX2.

oneDNN keeps the code that it makes for a number of rows, 0.6 MB for each shape, so rows are filled up to few numbers.
"""

import platform
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.cpu.build import is_cpu_by
from engine.layers.linear import Linear, PlainLinear
from engine.weights.formats import PlainFormat
from engine.weights.table import Product

MOST_ROWS = 2048  # at once


def is_faster() -> bool:
    """Whether this CPU is such a one and torch has oneDNN, which `torch.backends.mkldnn.enabled` switches off."""
    onednn: Any = torch.backends.mkldnn
    return platform.machine() == "x86_64" and is_cpu_by("AuthenticAMD") and onednn.enabled and onednn.is_available()


def count_padded(num_rows: int) -> int:
    """Powers of two up to 256, then four numbers from one power to the next."""
    power = 1 << (num_rows - 1).bit_length()
    step = power // 8 if power > 256 else power
    return -(-num_rows // step) * step


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows: [..., K], weight: [N, K], bias: [N], float32 |-> [..., N]. For inference."""
    flat = rows.reshape(-1, rows.shape[-1])
    if not len(flat) or not weight.is_contiguous():
        return functional.linear(rows, weight, bias)
    parts = [_multiply(part, weight, bias) for part in torch.split(flat, MOST_ROWS)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*rows.shape[:-1], len(weight))


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count, padded = len(rows), count_padded(len(rows))
    if padded > count:
        wide = rows.new_empty(padded, rows.shape[1])
        wide[:count], wide[count:] = rows, 0.0
        rows = wide
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out[:count]


@dataclass(frozen=True, slots=True, eq=False)
class FloatLinear(PlainLinear):
    """See above."""

    def __call__(self, rows: Tensor) -> Tensor:
        return multiply(rows, self.weight, self.bias)


@dataclass(frozen=True)
class FloatFormat(PlainFormat):
    """Plain weights in float32."""

    def linear(self, product: Product) -> Linear:
        return FloatLinear(self.reader.fuse(product), self.reader.bias(product))

    def _head(self, weight: Tensor) -> Linear:
        return FloatLinear(weight)


def use_floats(model: nn.Module) -> None:
    """The same for the products of transformers' code."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype is torch.float32:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, rows: Tensor) -> Tensor:
    return multiply(rows, module.weight, module.bias)
