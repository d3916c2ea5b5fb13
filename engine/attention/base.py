"""What the decoder asks of an attention backend. Knows shapes, not kernels."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What stays the same over a model's layers."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D
    scale: float  # multiplies q·k, usually D ** -0.5


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over a paged pool."""

    name: str  # "torch_sdpa", "cpu_paged", ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, pool: Tensor, batch: Batch, window: int | None
    ) -> Tensor:
        """Write the new keys and values into the pool, then attend to everything up to each query's own position.

        query: [T, Hq, D]; key, value: [T, Hkv, D], already rotated; any of them may be a strided view whose last
        dimension is contiguous. pool: [num_pages, num_layers, 2, Hkv, page_tokens, D] in the dtype of query; only
        [write_pages, layer, :, :, write_offsets] is modified. window: a query at position p sees positions
        (p - window, p]; None sees all. Returns [T, Hq, D], contiguous, in the dtype of query.
        """
        ...
