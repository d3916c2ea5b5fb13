"""What each layer is given of each token beside the hidden row (Gemma 4's per-layer inputs)."""

import torch
from torch import Tensor

from engine.layers.activation import activate
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.moe_config import Activation
from engine.ops.base import Ops


class TokenInputs:
    """For all layers: the token's row in a table of its own, and a product of its first hidden row, averaged."""

    __slots__ = ("_embedding", "_eps", "_multiplier", "_norm", "_ops", "_projection")

    def __init__(self, embedding: Embedding, projection: Linear, norm: Tensor, ops: Ops, eps: float) -> None:
        """embedding: V rows of L P; projection: H -> L P; norm: [P]"""
        self._embedding = embedding
        self._projection = projection
        self._norm = norm
        self._ops = ops
        self._eps = eps
        self._multiplier = float(torch.tensor(len(norm) ** 0.5, dtype=embedding.dtype))  # rounded as in transformers

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[T], [T, H] |-> [T, L, P]"""
        size = len(self._norm)
        projected = self._projection(hidden) * hidden.shape[1] ** -0.5  # [T, L P]
        normed = self._ops.norm(projected.view(-1, size), self._norm, self._eps)
        embedded = (self._embedding(token_ids) * self._multiplier).view(-1, size)
        return ((normed + embedded) * 2**-0.5).view(len(token_ids), -1, size)


class InputBlock:
    """Of one layer: its input, gated by the hidden row."""

    __slots__ = ("_activation", "_gate", "_projection")

    def __init__(self, gate: Linear, projection: Linear, activation: Activation) -> None:
        """gate: H -> P; projection: P -> H"""
        self._gate = gate
        self._projection = projection
        self._activation = activation

    def __call__(self, rows: Tensor, own: Tensor) -> Tensor:
        """[T, H], [T, P] |-> [T, H]. Does not modify them."""
        return self._projection(activate(self._gate(rows), own, self._activation))
