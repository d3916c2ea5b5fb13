"""What the decoder asks of an attention backend. Knows shapes, not kernels."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.heads import Heads
from engine.batch import Batch

FP8_LIMIT = 448.0  # the largest float8_e4m3fn; pages of that type have no scale


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What stays the same over a model's layers."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D
    scale: float  # multiplies q·k, usually D ** -0.5


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over a paged pool: `plan` once a step, then `attend` for each layer."""

    name: str  # "torch_sdpa", "cpu_paged", ...
    is_capturable: bool  # what `attend` launches depends on the plan's tensors alone, so that a CUDA graph can hold it

    def plan(self, pool: Tensor, batch: Batch) -> None:
        """Prepare for `batch` over `pool`, until the next plan. Does not modify either.

        pool: as wire.kv_layout orders it. ValueError may name what does not fit.
        """
        ...

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "AttentionBackend":
        """One for steps that are captured and replayed: of exactly so many sequences with so many new tokens each.

        `plan` is called before each replay, with tensors at the same addresses; all sequences together have up to
        `num_pages` pages. Not at the same time as this one.
        """
        ...

    def attend(self, layer: int, heads: Heads, window: int | None) -> Tensor:
        """Write the new keys and values into the pool, then attend to everything up to each query's own position.

        Of the pool only the rows of the new tokens at this layer are modified; `heads` may be overwritten. window: a
        query at position p sees positions (p - window, p]; None sees all. Returns [T, Hq, D], contiguous, in the dtype
        of the queries.
        """
        ...
