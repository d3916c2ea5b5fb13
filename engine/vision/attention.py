"""Attention of models whose images are seen as wholes: a token of one sees the tokens after it, too."""

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.batch import Batch


class WholeImageAttention:
    """An `AttentionBackend`: the device's, and in steps with such images torch's, which alone reads what they see."""

    def __init__(self, usual: AttentionBackend, reference: AttentionBackend) -> None:
        self.name, self.is_capturable = usual.name, usual.is_capturable
        self._usual, self._reference = usual, reference
        self._planned = usual

    def plan(self, pool: Tensor, batch: Batch) -> None:
        has_wholes = batch.embedded is not None and batch.embedded.visible_until is not None
        self._planned = self._reference if has_wholes else self._usual
        self._planned.plan(pool, batch)

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> AttentionBackend:
        return self._usual.for_graph(num_sequences, num_tokens, num_pages)  # no graph has images

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        return self._planned.attend(layer, heads, window, sinks)
