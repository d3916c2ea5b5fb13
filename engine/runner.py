"""One forward and its sampled tokens: the engine as the worker loops see it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend
from engine.batch import SequenceSlice, build_batch
from engine.kvcache.pool import Pool
from engine.model.decoder import Decoder
from engine.sampling import SamplingParams, sample


@dataclass(frozen=True, slots=True)
class Choice:
    """How to choose the token after a slice."""

    sampling: SamplingParams
    position: int  # index in its sequence of the token to choose


class Runner:
    """Owns the model and the attention backend; writes KV into the pool's pages that slices name."""

    def __init__(self, model: Decoder, attention: AttentionBackend, pool: Pool) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._device = pool.tensor.device

    @torch.inference_mode()
    def run(self, slices: Sequence[SequenceSlice], choices: Sequence[Choice]) -> list[int]:
        """Compute the slices' KV; return a token for each slice that wants logits, by `choices`."""
        batch = build_batch(slices, self._pool.shape.page_tokens, self._device)
        logits = self._model.forward(batch, self._pool.tensor, self._attention)  # [S, V]
        if not choices:
            if self._device.type == "cuda":
                torch.cuda.synchronize()  # the caller offers these pages to another process next
            return []
        tokens = sample(logits, [choice.sampling for choice in choices], [choice.position for choice in choices])
        ids: list[int] = tokens.tolist()
        return ids
