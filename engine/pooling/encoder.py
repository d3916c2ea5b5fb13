"""Models whose texts are computed at once, by transformers' code: attention goes both ways, or all rows are pooled.

Same interface as `Decoder`; pages stay as they are. Texts of about one length are computed together.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
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
PART_TOKENS = 512  # of texts that one thread computes together: their rows stay in its cache
SLACK = 9 / 8  # times that, or a thread's share: texts of almost one length are divided evenly


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
        num_threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        self._threads = ThreadPoolExecutor(num_threads, "texts") if num_threads > 1 else None

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        """See `Decoder.forward`, but of each text, which begins and ends here: its pooled row, or logits, [S, D]."""
        counts = batch.query_lens_host
        if (counts != batch.seq_lens_host).any():
            raise ValueError("a text of this model is computed at once; it was divided")
        ids, num_threads = torch.split(batch.token_ids, counts.tolist()), torch.get_num_threads()
        is_shared = self._threads is not None and len(ids) >= num_threads
        most = SLACK * min(counts.sum() / num_threads, PART_TOKENS) if is_shared else math.inf
        groups = group_by_length(counts, most)
        parts = [[ids[at] for at in group] for group in groups]
        found = self._compute_apart(parts, num_threads) if is_shared else [self._compute(part) for part in parts]
        rows = dict(zip(chain.from_iterable(groups), chain.from_iterable(found), strict=True))
        return torch.stack([rows[at] for at in range(len(ids))])

    def _compute_apart(self, parts: Sequence[Sequence[Tensor]], num_threads: int) -> list[Tensor]:
        """`_compute` of each, one thread to a part. Threads that share products wait for each other at each: a gateway
        beside them on one of the cores stops all."""
        assert self._threads is not None
        running = [self._threads.submit(self._compute_alone, part) for part in parts]
        wait(running)  # also where one fails
        torch.set_num_threads(num_threads)  # what threads of torch begin with is the last number that one has set
        return [one.result() for one in running]

    @torch.inference_mode()
    def _compute_alone(self, ids: Sequence[Tensor]) -> Tensor:
        torch.set_num_threads(1)  # of this thread
        return self._compute(ids)

    def _compute(self, texts: Sequence[Tensor]) -> Tensor:
        """G texts of about one length, [T] each |-> [G, D]"""
        ids = torch.nn.utils.rnn.pad_sequence(list(texts), True, self._padding)  # [G, T]
        lengths = torch.tensor([len(one) for one in texts], device=ids.device)
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


def group_by_length(counts: Sequence[int] | np.ndarray[Any, Any], most: float = math.inf) -> list[list[int]]:
    """Indices of texts that are computed together: none is padded by more than a quarter, and a group of several has
    `most` tokens with the padding."""
    groups: list[list[int]] = []
    for at in np.argsort(counts, kind="stable").tolist():
        if not groups or counts[at] > PADDED * counts[groups[-1][0]] or counts[at] * (len(groups[-1]) + 1) > most:
            groups.append([])
        groups[-1].append(at)
    return groups
