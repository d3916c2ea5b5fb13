"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 family: one ragged batch in, hidden rows and logits out.

Knows tensors and the order of operations, which is transformers'; nothing of files, requests or sampling. The backend
decides how attention accesses pages, `Linear` the memory layout of weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.qkv import Heads, Turn
from engine.batch import Batch
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.rope import build_rope_table, gather_rotation
from engine.models.config import ModelConfig
from engine.ops.base import Ops
from engine.ranks import ONE_RANK, Ranks


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; query, key and value are one product, gate and up another."""

    input_norm: Tensor  # [H]
    qkv_proj: Linear  # H -> (Hq + 2 Hkv) D: all query heads, then key heads, then value heads
    qk_norm: Tensor | None  # [Hq + Hkv, D], the query norm's row Hq times, then the key norm's; Qwen3
    o_proj: Linear  # Hq D -> H
    mlp_norm: Tensor  # [H]
    gate_up_proj: Linear  # H -> I: silu(gate) * up
    down_proj: Linear  # I -> H


class Decoder:
    """A loaded model. Holds weights only: the caller's pool holds all state of sequences."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: Linear,
        ops: Ops,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """config: of this rank's part. The embedding's dtype and device are the model's; final_norm: [H].

        lm_head: H -> this rank's part of the vocabulary, in float32.
        """
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._lm_head = lm_head
        self.ranks = ranks
        self.mapped_bytes = 0  # bytes of packed weights mapped from a file
        self.why_unshared: str | None = None  # why each worker of this host has its own packed weights
        table = build_rope_table(config.rope, config.head_dim, config.context_tokens)
        self._rope_table = table.to(self.device, self.dtype)  # [context_tokens, 2, D / 2]
        self.ops = ops

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        """Run one step: write the KV of all new tokens into `pool`, return the rows that `logits` needs.

        pool: axes as in wire.kv_layout, in the model's dtype; modifies only rows that the batch names. Positions must
        be below the context length. Returns [S, H], normed, for `batch.logits_rows`; [0, H] if S is 0.
        """
        attention.plan(pool, batch)
        return self.run_planned(batch, attention)

    def run_planned(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """`forward` after the plan. Only launches; shapes follow from those of `batch`."""
        ops, eps = self.ops, self.config.rms_eps
        turn = Turn(*gather_rotation(self._rope_table, batch.positions), None, eps)
        hidden = self._embedding(batch.token_ids)  # [T, H]
        normed = ops.norm(hidden, self._layers[0].input_norm, eps)
        norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]  # norm after each layer
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            attended = self._attend(index, layer, normed, turn, attention)  # [T, Hq D]
            if index == len(self._layers) - 1:
                # after the last layer's KV is written, only rows with logits matter
                if not batch.logits_rows.numel():
                    self.ranks.meet(self.device)  # no sum follows: this makes all ranks finish the step together
                    return hidden[:0]
                attended, hidden = _keep_rows(attended, batch), _keep_rows(hidden, batch)  # [S, ...]
            normed = ops.add_norm_(hidden, layer.o_proj(attended), layer.mlp_norm, eps)
            mlp = layer.down_proj(layer.gate_up_proj(normed))  # [T, H]
            normed = ops.add_norm_(hidden, mlp, next_norm, eps)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] rows from `forward`, or some of them |-> [S, V] float32, owned by the caller."""
        return self.ranks.join(self._lm_head(hidden))

    @torch.inference_mode()
    def deal_logits(self, hidden: Tensor) -> Tensor:
        """Like `logits`, but only for the rows whose tokens this rank samples (`Ranks.own_rows`): [m, V]."""
        return self.ranks.deal(self._lm_head(hidden))

    def _attend(
        self, index: int, layer: DecoderLayer, normed: Tensor, turn: Turn, attention: AttentionBackend
    ) -> Tensor:
        """normed: [T, H] |-> [T, Hq D], before the output projection."""
        config = self.config
        qkv = layer.qkv_proj(normed)  # [T, (Hq + 2 Hkv) D]
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        new = Heads(heads[:, :num_turned], heads[:, num_turned:], turn._replace(norm=layer.qk_norm))
        attended = attention.attend(index, new, config.windows[index])  # [T, Hq, D]
        return attended.view(-1, config.num_heads * config.head_dim)


def _keep_rows(rows: Tensor, batch: Batch) -> Tensor:
    """[T, N] |-> [S, N]; the same tensor if all rows are wanted, as in every plain decode step."""
    wanted = batch.logits_rows
    return rows if wanted.numel() == rows.shape[0] else rows.index_select(0, wanted)
