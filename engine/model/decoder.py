"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 family: one ragged batch in, hidden rows and logits out.

Knows tensors and the order of operations, which is transformers'; knows nothing of files, requests or sampling. How
attention reaches the pages is the backend's business, how weights lie in memory is `Linear`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.model.config import ModelConfig
from engine.model.head import Head
from engine.model.linear import Linear
from engine.model.rope import build_rope_table, gather_rotation, rotate


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights, query/key/value fused into one product and gate/up into another."""

    input_norm: Tensor  # [H]
    qkv: Linear  # H -> (Hq + 2 Hkv) D: all query heads, then key heads, then value heads
    query_key_norm: Tensor | None  # [Hq + Hkv, D], the query norm's row Hq times, then the key norm's; Qwen3
    output: Linear  # Hq D -> H
    mlp_norm: Tensor  # [H]
    gate_up: Linear  # H -> 2 I: gate, then up
    down: Linear  # I -> H


class Decoder:
    """A loaded model. Holds weights only: all state of sequences lies in the pool that the caller passes."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: Head,
    ) -> None:
        """embedding: [V, H], whose dtype and device are the model's; final_norm: [H]; lm_head: H -> V."""
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._lm_head = lm_head
        table = build_rope_table(config.rope, config.head_dim, config.context_tokens)
        self._rope_table = table.to(self.device, self.dtype)  # [context_tokens, 2, D / 2]

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        """Run one step: write the KV of all new tokens into `pool`, return the rows that `logits` needs.

        pool: in the order of wire.kv_layout and the model's dtype; only rows that the batch names are modified.
        Positions must be below the context length. Returns [S, H], normed, for `batch.logits_rows`; [0, H] when S is 0.
        """
        attention.plan(pool, batch)
        cos, signed_sin = gather_rotation(self._rope_table, batch.positions)  # [T, 1, D] each
        hidden = functional.embedding(batch.token_ids, self._embedding)  # [T, H]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, hidden, cos, signed_sin, attention)  # [T, Hq D]
            if index == last:
                # Nobody reads the last layer's other rows: its KV is written, the rest is for the logits alone.
                if not batch.logits_rows.numel():
                    return hidden[:0]
                attended, hidden = _keep_rows(attended, batch), _keep_rows(hidden, batch)  # [S, ...]
            hidden.add_(layer.output(attended))
            hidden.add_(self._mlp(layer, hidden))
        return self._norm(hidden, self._final_norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] rows that `forward` returned, or some of them |-> [S, V], float32 from here on; the caller's own."""
        return self._lm_head(hidden)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        attention: AttentionBackend,
    ) -> Tensor:
        """hidden: [T, H] |-> [T, Hq D], before the output projection."""
        config = self.config
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))  # [T, (Hq + 2 Hkv) D]
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]  # [T, Hq + Hkv, D], [T, Hkv, D]
        if layer.query_key_norm is not None:
            query_key = functional.rms_norm(query_key, (config.head_dim,), None, config.rms_eps) * layer.query_key_norm
        query_key = rotate(query_key, cos, signed_sin)
        query, key = query_key[:, : config.num_heads], query_key[:, config.num_heads :]
        attended = attention.attend(index, query, key, value, config.windows[index])  # [T, Hq, D]
        return attended.view(-1, config.num_heads * config.head_dim)

    def _mlp(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """hidden: [T, H] |-> [T, H], without the residual."""
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)  # [T, I] each
        return layer.down(functional.silu(gate).mul_(up))

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm with its sum in float32. rows: [T, H], weight: [H]."""
        return functional.rms_norm(rows, weight.shape, weight, self.config.rms_eps)


def _keep_rows(rows: Tensor, batch: Batch) -> Tensor:
    """[T, N] |-> [S, N]; the same tensor when all rows are wanted, as in every plain decode step."""
    wanted = batch.logits_rows
    return rows if wanted.numel() == rows.shape[0] else rows.index_select(0, wanted)
