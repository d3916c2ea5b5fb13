"""The interface of attention backends. Knows shapes, not kernels."""

from typing import Protocol

from torch import Tensor

from engine.attention.qkv import QKV
from engine.batch import Batch

FP8_LIMIT = 448.0  # largest float8_e4m3fn value; fp8 pages have no scale


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over a paged pool: `plan` once a step, then `attend` for each layer."""

    name: str  # "torch_sdpa", "cpu_paged", ...
    is_capturable: bool  # `attend` launches depend on the plan's tensors alone, so a CUDA graph can capture them

    def plan(self, pool: Tensor, batch: Batch) -> None:
        """Prepare for `batch` over `pool`, until the next plan. Modifies neither.

        pool: axes as in wire.kv_layout. May raise ValueError naming what does not fit.
        """
        ...

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "AttentionBackend":
        """A backend for captured steps of exactly `num_sequences` sequences with `num_tokens` new tokens each.

        `plan` runs before each replay, with tensors at the same addresses. All sequences together have at most
        `num_pages` pages. Do not use it and this backend at the same time.
        """
        ...

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        """Write the new keys and values into the pool, then attend to everything up to each query's own position.
        Heads without any: another call of this step has written them to this layer.

        Modifies only the new tokens' rows at this layer of the pool; may overwrite `heads`. window: a query at position
        p sees positions (p - window, p]; None sees all. sinks: [Hq] float32, one logit for each query head; it joins
        the softmax, neither scaled nor capped, and has no value. Returns [T, Hq, D], contiguous, in the queries' dtype;
        of layers whose values are part of the keys, [T, Hq, Dv].
        """
        ...
