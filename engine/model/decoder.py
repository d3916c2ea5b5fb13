"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 family: one ragged batch in, hidden rows and logits out.

Knows tensors and the order of operations, which is transformers'; knows nothing of files, requests or sampling. How
attention reaches the pages is the backend's business, how weights lie in memory is `Linear`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.heads import Heads, Turn
from engine.batch import Batch
from engine.model.config import ModelConfig
from engine.model.embedding import Embedding
from engine.model.head import Head
from engine.model.linear import Linear
from engine.model.operations import Operations, choose_operations
from engine.model.rope import build_rope_table, gather_rotation
from engine.ranks import ONE_RANK, Ranks


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights, query/key/value fused into one product and gate/up into another."""

    input_norm: Tensor  # [H]
    qkv: Linear  # H -> (Hq + 2 Hkv) D: all query heads, then key heads, then value heads
    query_key_norm: Tensor | None  # [Hq + Hkv, D], the query norm's row Hq times, then the key norm's; Qwen3
    output: Linear  # Hq D -> H
    mlp_norm: Tensor  # [H]
    gated: Linear  # H -> I: silu(gate) * up
    down: Linear  # I -> H


class Decoder:
    """A loaded model. Holds weights only: all state of sequences lies in the pool that the caller passes."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: Head,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """config: of what this rank computes. The embedding's dtype and device are the model's; final_norm: [H]."""
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._lm_head = lm_head
        self.ranks = ranks
        self.mapped_bytes = 0  # of packed weights that lie in a file
        self.why_unshared: str | None = None  # packed weights that each worker of this host has for itself: why
        table = build_rope_table(config.rope, config.head_dim, config.context_tokens)
        self._rope_table = table.to(self.device, self.dtype)  # [context_tokens, 2, D / 2]
        self._operations: Operations = choose_operations(self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        """Run one step: write the KV of all new tokens into `pool`, return the rows that `logits` needs.

        pool: in the order of wire.kv_layout and the model's dtype; only rows that the batch names are modified.
        Positions must be below the context length. Returns [S, H], normed, for `batch.logits_rows`; [0, H] when S is 0.
        """
        attention.plan(pool, batch)
        return self.run_planned(batch, attention)

    def run_planned(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """`forward` after the plan: launches only, of shapes that follow from those of `batch`."""
        operations, eps = self._operations, self.config.rms_eps
        turn = Turn(*gather_rotation(self._rope_table, batch.positions), None, eps)
        hidden = self._embedding(batch.token_ids)  # [T, H]
        normed = operations.norm(hidden, self._layers[0].input_norm, eps)
        norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]  # each after its layer
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            attended = self._attend(index, layer, normed, turn, attention)  # [T, Hq D]
            if index == len(self._layers) - 1:
                # Only rows with logits matter after the last layer's KV is written.
                if not batch.logits_rows.numel():
                    self.ranks.meet(self.device)  # a step that is done is done on all ranks: they have no sum after it
                    return hidden[:0]
                attended, hidden = _keep_rows(attended, batch), _keep_rows(hidden, batch)  # [S, ...]
            normed = operations.add_norm_(hidden, layer.output(attended), layer.mlp_norm, eps)
            mlp = layer.down(layer.gated(normed))  # [T, H]
            normed = operations.add_norm_(hidden, mlp, next_norm, eps)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] rows that `forward` returned, or some of them |-> [S, V], float32 from here on; the caller's own."""
        return self._lm_head(hidden)

    @torch.inference_mode()
    def deal_logits(self, hidden: Tensor) -> Tensor:
        """As `logits`, but only those rows that this rank chooses tokens for (`Ranks.own_rows`): [m, V]."""
        return self._lm_head.deal(hidden)

    def _attend(
        self, index: int, layer: DecoderLayer, normed: Tensor, turn: Turn, attention: AttentionBackend
    ) -> Tensor:
        """normed: [T, H] |-> [T, Hq D], before the output projection."""
        config = self.config
        qkv = layer.qkv(normed)  # [T, (Hq + 2 Hkv) D]
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        new = Heads(heads[:, :num_turned], heads[:, num_turned:], turn._replace(norm=layer.query_key_norm))
        attended = attention.attend(index, new, config.windows[index])  # [T, Hq, D]
        return attended.view(-1, config.num_heads * config.head_dim)


def _keep_rows(rows: Tensor, batch: Batch) -> Tensor:
    """[T, N] |-> [S, N]; the same tensor when all rows are wanted, as in every plain decode step."""
    wanted = batch.logits_rows
    return rows if wanted.numel() == rows.shape[0] else rows.index_select(0, wanted)
