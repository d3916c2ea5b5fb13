"""Inputs that each layer gets for each token beside the hidden row (Gemma 4's per-layer inputs)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layer_config import Activation
from engine.layers.linear import Embedding, Linear
from engine.models.assemble import LayerBuilder
from engine.ops.base import Ops, activate


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """For all layers: the token's row in a table of its own, and a product of its first hidden row, averaged."""

    embedding: Embedding  # V rows of L P
    projection: Linear  # H -> L P
    norm: Tensor  # [P]
    ops: Ops
    eps: float

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[T], [T, H] |-> [T, L, P]"""
        size = len(self.norm)
        multiplier = float(torch.tensor(size**0.5, dtype=self.embedding.dtype))  # rounded as in transformers
        projected = self.projection(hidden) * hidden.shape[1] ** -0.5  # [T, L P]
        normed = self.ops.norm(projected.view(-1, size), self.norm, self.eps)
        embedded = (self.embedding(token_ids) * multiplier).view(-1, size)
        return ((normed + embedded) * 2**-0.5).view(len(token_ids), -1, size)


@dataclass(frozen=True, slots=True, eq=False)
class InputBlock:
    """One layer's use of its input, which the hidden row gates."""

    gate: Linear  # H -> P
    projection: Linear  # P -> H
    activation: Activation

    def __call__(self, rows: Tensor, own: Tensor) -> Tensor:
        """[T, H], [T, P] |-> [T, H]. Does not modify them."""
        return self.projection(activate(self.gate(rows), own, self.activation))


def build_token_inputs(builder: LayerBuilder) -> TokenInputs:
    """The token inputs of all layers."""
    format, table = builder.format, builder.table.products["token_embedding"]
    embedding = builder.sum_rows(Embedding(format.reader.fuse(table)))
    projection = builder.linear("token_projection")
    return TokenInputs(embedding, projection, builder.norm("token_norm"), format.ops, builder.config.rms_eps)


def build_input_block(builder: LayerBuilder) -> InputBlock:
    """The input block of the builder's layer."""
    return InputBlock(builder.linear("input_gate"), builder.linear("input_projection"), builder.config.activation)
