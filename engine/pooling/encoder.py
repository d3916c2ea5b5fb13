"""Models whose texts are computed at once, by transformers' code: attention goes both ways, or all rows are pooled.

Same interface as `Decoder`; pages stay as they are. Texts of about one length are computed together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.fallback.config import FallbackConfig
from engine.layers.linear import NO_ADDITIONS
from engine.ops.base import Ops
from engine.ranks import ONE_RANK, Ranks
from wire.pooling import Pooling

PADDED = 1.25  # the longest text of a group against the shortest


class Encoder:
    """Holds weights only. One step at a time."""

    is_capturable = False  # transformers' code may read values on the host

    def __init__(
        self, model: Any, config: FallbackConfig, pooling: Pooling, ops: Ops, separator: int | None = None
    ) -> None:
        """model: a PreTrainedModel with its weights on their device; this object takes it over.

        separator: the token between two texts, where the model has segments: of a pair the second one is another.
        """
        weight = model.get_input_embeddings().weight
        self.config, self.ops = config, ops
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.ranks: Ranks = ONE_RANK
        self.mapped_bytes = 0
        self.additions = NO_ADDITIONS
        self.why_unshared: str | None = None
        self._model = model.eval().requires_grad_(False)
        self._pooling = pooling
        self._separator = separator
        self._padding = getattr(model.config, "pad_token_id", None) or 0

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        """See `Decoder.forward`, but of each text, which begins and ends here: its pooled row, or logits, [S, D]."""
        counts = batch.query_lens_host
        if (counts != batch.seq_lens_host).any():
            raise ValueError("a text of this model is computed at once; it was divided")
        ids = torch.split(batch.token_ids, counts.tolist())
        rows: list[Tensor | None] = [None] * len(ids)
        for group in group_by_length(counts):
            padded = torch.nn.utils.rnn.pad_sequence([ids[at] for at in group], True, self._padding)  # [G, T]
            lengths = torch.tensor([len(ids[at]) for at in group], device=padded.device)
            for at, row in zip(group, self._compute(padded, lengths), strict=True):
                rows[at] = row
        return torch.stack([row for row in rows if row is not None])

    def _compute(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """[G, T] padded at the end, [G] |-> [G, D]"""
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        given = {"input_ids": ids, "attention_mask": mask.long()}
        if self._separator is not None:
            is_end = (ids == self._separator).long()
            given["token_type_ids"] = ((is_end.cumsum(-1) - is_end) > 0).long() * mask
        if self._pooling.labels:
            logits: Tensor = self._model(**given).logits
            return logits.float()
        hidden: Tensor = self._model(**given).last_hidden_state.float()  # [G, T, H]
        if self._pooling.pool == "cls":
            return hidden[:, 0]
        if self._pooling.pool == "last":
            return hidden[torch.arange(len(ids), device=ids.device), lengths - 1]
        return (hidden * mask[..., None]).sum(1) / lengths[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows from `forward` |-> the same."""
        return hidden


def group_by_length(counts: Sequence[int] | np.ndarray[Any, Any]) -> list[list[int]]:
    """Indices of texts that are computed together: none is padded by more than a quarter."""
    groups: list[list[int]] = []
    for at in np.argsort(counts, kind="stable").tolist():
        if not groups or counts[at] > PADDED * counts[groups[-1][0]]:
            groups.append([])
        groups[-1].append(at)
    return groups
