"""Interfaces of layers that keep something other than heads' KV: in place of attention, or of its heads."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.qkv import QKV


class StateRows(NamedTuple):
    """Where the states of B sequences are, and their rows among T."""

    sources: Tensor  # [B] int64, slot with the state before the step; -1: the sequence begins, its state is zeros
    targets: Tensor
    """[B] int64, slot for the state after the step. Several sequences may share a source; targets differ, and are no
    sequence's source. Only surplus rows of captured graphs share one padding target with each other."""
    starts: Tensor  # [B + 1] int32, first row of each sequence; ends with T
    counts_host: NDArray[np.int32]  # [B] rows of each sequence, on the host, >= 1


class Mixer(Protocol):
    """Lets the rows of a sequence see the earlier ones, of which it keeps a state in a slot of a pool."""

    def __call__(self, rows: Tensor, at: StateRows, states: Sequence[Tensor]) -> Tensor:
        """[T, ...] of the layer's first product |-> [T, N]. Reads the states at `sources`, writes those at `targets`.

        states: this layer's in all slots, [num_slots, heads, ...] of each of the model's StateParts.
        """
        ...


class Projection(Protocol):
    """Makes what attention gets of a layer's first product, where that is not heads."""

    def __call__(self, rows: Tensor, cos: Tensor, signed_sin: Tensor) -> QKV:
        """[T, ...], and two of [T, 1, D] as in `RopeArgs`. May overwrite rows."""
        ...
