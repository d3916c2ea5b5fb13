"""A layer's new queries, keys and values between the projection and attention: norm and rotation.

Backends without a kernel for this call `QKV.ready`, the slow twin of cuda/gpu_layers.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class RopeArgs(NamedTuple):
    """The rest of the work on queries and keys: an RMSNorm per head, if the model has one, then the rotation."""

    cos: Tensor  # [T, 1, D]
    signed_sin: Tensor  # [T, 1, D], the first half negated
    norm: Tensor | None  # [Hq + Hkv, D] weights; None: no norm
    eps: float


AnyTurn = tuple[Tensor | None, Tensor | None, Tensor | None, float]
NO_ROPE: AnyTurn = (None, None, None, 0.0)


class QKV(NamedTuple):
    """T tokens: strided views of one product; the last two dimensions are contiguous. Backends may overwrite them."""

    query_key: Tensor  # [T, Hq + Hkv, D], all query heads, then all key heads
    value: Tensor  # [T, Hkv, D]; Hkv is 0 if the layer's keys and values are already in the pool
    rope: RopeArgs | None = None  # None: queries and keys are ready
    weights: Any = None  # of the layer, for backends that compute heads from what pages have

    @property
    def num_heads(self) -> int:
        """Hq"""
        return self.query_key.shape[1] - self.value.shape[1]

    def ready(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D], ready for attention."""
        query_key = self.query_key if self.rope is None else apply_rope_slowly(self.query_key, self.rope)
        return query_key[:, : self.num_heads], query_key[:, self.num_heads :], self.value


class Attend(NamedTuple):
    """The arguments of `AttentionBackend.attend`."""

    layer: int  # whose KV, among those with KV of their own
    heads: QKV
    window: int | None
    sinks: Tensor | None


def apply_rope_slowly(query_key: Tensor, rope: RopeArgs) -> Tensor:
    """[T, Hq + Hkv, D] |-> the same, contiguous."""
    if rope.norm is not None:
        wide = query_key if rope.norm.dtype is query_key.dtype else query_key.float()  # Gemma's 1 + weight
        query_key = (functional.rms_norm(wide, query_key.shape[-1:], None, rope.eps) * rope.norm).to(query_key.dtype)
    return rotate(query_key, rope.cos, rope.signed_sin)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D / 2) as transformers does: x cos + rotate_half(x) sin, with the sign kept in the table.

    heads: [T, H, D], last dimension contiguous; cos, signed_sin: [T, 1, D]. Returns [T, H, D], contiguous.
    """
    num_rows, num_heads, head_dim = heads.shape
    swapped = heads.view(num_rows, num_heads, 2, head_dim // 2).flip(-2).view(num_rows, num_heads, head_dim)
    return torch.mul(heads, cos).addcmul_(swapped, signed_sin)


def gather_rotation(table: Tensor, positions: Tensor, axes: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Look up one step's rotation. table: [num_positions, 2, D / 2]; positions: [T], each below num_positions, or
    [3, T] with `RopeConfig.axes`.

    Returns cos [T, 1, D] and signed sin [T, 1, D], whose first half is negated, for `rotate`.
    """
    found = table[positions]  # [T, 2, D / 2], or [3, T, 2, D / 2]
    if positions.ndim == 2:
        turned = torch.stack([found[axis, ..., pair] for pair, axis in enumerate(axes)], -1)
        found = torch.cat((turned, found[0, ..., len(axes) :]), -1)
    cos, sin = found.unbind(1)  # [T, D / 2] each
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


class Rotations:
    """Looks up the rotations of a step, by each of a model's ropes."""

    def __init__(self, tables: Sequence[Tensor], axes: Sequence[Sequence[int]]) -> None:
        """tables: [num_positions, 2, D / 2] each, see `layers.rope.build_rope_table`."""
        self._tables, self._axes = tables, axes

    def __call__(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """[T] or [3, T] |-> of each rope, see `gather_rotation`."""
        return [gather_rotation(table, positions, axes) for table, axes in zip(self._tables, self._axes, strict=True)]
