"""A layer's new queries, keys and values between the projection and attention: norm and rotation.

Backends without a kernel for this call `Heads.turned`, the slow twin of kernels/gpu_layers.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Turn(NamedTuple):
    """What queries and keys still need: an RMSNorm per head, if the model has one, then the rotation."""

    cos: Tensor  # [T, 1, D]
    signed_sin: Tensor  # [T, 1, D], the first half negated
    norm: Tensor | None  # [Hq + Hkv, D] weights; None: no norm
    eps: float


AnyTurn = tuple[Tensor | None, Tensor | None, Tensor | None, float]
NO_TURN: AnyTurn = (None, None, None, 0.0)


class Heads(NamedTuple):
    """T tokens: strided views of one product; the last two dimensions are contiguous. Backends may overwrite them."""

    query_key: Tensor  # [T, Hq + Hkv, D], all query heads, then all key heads
    value: Tensor  # [T, Hkv, D]; Hkv is 0 if the layer's keys and values are already in the pool
    turn: Turn | None = None  # None: queries and keys are ready

    @property
    def num_heads(self) -> int:
        """Hq"""
        return self.query_key.shape[1] - self.value.shape[1]

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D], ready for attention."""
        query_key = self.query_key if self.turn is None else turn_slowly(self.query_key, self.turn)
        return query_key[:, : self.num_heads], query_key[:, self.num_heads :], self.value


def turn_slowly(query_key: Tensor, turn: Turn) -> Tensor:
    """[T, Hq + Hkv, D] |-> the same, contiguous."""
    if turn.norm is not None:
        wide = query_key if turn.norm.dtype is query_key.dtype else query_key.float()  # Gemma's 1 + weight
        query_key = (functional.rms_norm(wide, query_key.shape[-1:], None, turn.eps) * turn.norm).to(query_key.dtype)
    return rotate(query_key, turn.cos, turn.signed_sin)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D / 2) as transformers does: x cos + rotate_half(x) sin, with the sign kept in the table.

    heads: [T, H, D], last dimension contiguous; cos, signed_sin: [T, 1, D]. Returns [T, H, D], contiguous.
    """
    num_rows, num_heads, head_dim = heads.shape
    swapped = heads.view(num_rows, num_heads, 2, head_dim // 2).flip(-2).view(num_rows, num_heads, head_dim)
    return torch.mul(heads, cos).addcmul_(swapped, signed_sin)
