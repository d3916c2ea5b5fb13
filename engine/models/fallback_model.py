"""A model that runs by transformers' own code, over Baton's pages. Same interface as `Decoder`.

transformers computes everything but attention, which goes to the step's backend. Knows no family of models.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.batch import Batch
from engine.models.fallback_attention import SERVE
from engine.models.fallback_config import FallbackConfig
from engine.ops.choose import ops_for
from engine.ranks import ONE_RANK, Ranks


class FallbackModel:
    """Holds weights only: the caller's pool holds all state of sequences. One step at a time."""

    is_capturable = False  # transformers' code may read values on the host

    def __init__(self, model: Any, config: FallbackConfig) -> None:
        """model: a PreTrainedModel with its weights on their device; this object takes it over."""
        self.config = config
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.ops = ops_for(self.device)
        self.ranks: Ranks = ONE_RANK
        self.mapped_bytes = 0
        self.why_unshared: str | None = None
        if self.device.type == "cpu":
            self.why_unshared = f"{config.family} runs by transformers' code, which shares no weights"
        self._model = model.eval().requires_grad_(False)
        self._chooses_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._attention: AttentionBackend | None = None  # of the running step
        model.set_attn_implementation(SERVE)
        for layer, name in enumerate(config.attention_modules):
            model.get_submodule(name).baton_attend = partial(self._attend, layer)

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        """See `Decoder.forward`, but returns the logits themselves: [S, V] float32, owned by the caller."""
        attention.plan(pool, batch)
        return self.run_planned(batch, attention)

    def run_planned(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """`forward` after the plan."""
        rows = {"logits_to_keep": batch.logits_rows} if self._chooses_rows else {}
        self._attention = attention
        try:
            output = self._model(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **rows
            )
        finally:
            self._attention = None
        logits: Tensor = output.logits[0]  # [S or T, V]
        return (logits if self._chooses_rows else logits.index_select(0, batch.logits_rows)).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows from `forward` |-> the same: the class of the model has applied its head, scaling and softcap."""
        return hidden

    own_logits = logits

    @torch.inference_mode()
    def compute_alone(self, token_ids: Tensor) -> Tensor:
        """The truth: [T] ids of one sequence |-> [T, V] float32 by transformers alone, with its eager attention."""
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(SERVE)
        return logits.float()

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """See `fallback_attention.Attend`. Copies the heads: a backend may overwrite them, layers may share them."""
        assert self._attention is not None
        head_dim, num_rotated = self.config.attention_shapes[layer].head_dim, query.shape[1] + key.shape[1]
        joined = torch.cat([_widen(heads[0].transpose(0, 1), head_dim) for heads in (query, key, value)], 1)
        joined = joined.to(self.dtype)  # [T, Hq + 2 Hkv, D]
        heads = QKV(joined[:, :num_rotated], joined[:, num_rotated:])
        sinks: Tensor | None = options.get("s_aux")
        if sinks is not None:
            sinks = sinks.flatten().float()  # [Hq]
        attended = self._attention.attend(layer, heads, self.config.windows[layer], sinks)  # [T, Hq, D]
        return attended[None, ..., : value.shape[-1]].to(query.dtype)


def _widen(heads: Tensor, head_dim: int) -> Tensor:
    """[T, H, n] |-> [T, H, D] with zeros at the end: they change neither scores nor the first n values."""
    missing = head_dim - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads
