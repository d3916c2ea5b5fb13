"""Drafts from a model's hidden rows, here by one layer, with the model's embedding and perhaps its lm_head.

    position i:   [ hidden row of the model at i | token at i + 1 ] |-> the token at i + 2

Its own rows take the place of the model's where the model has not been yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import EmbeddedRows
from engine.heads.config import DraftHead
from engine.layers.linear import Embedding, Linear
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer, Flow
from engine.ops.base import Ops
from engine.ranks import Ranks
from wire.sampling import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """Weights that make the layer's rows."""

    fc: Linear  # EAGLE-3: taps |-> H; MTP: a token's row and a hidden row, 2 H |-> H
    hidden_norm: Tensor  # [H]
    embedding_norm: Tensor | None  # [H], MTP
    input_norm: Tensor | None  # [N H] of all taps
    tap_norms: Sequence[Tensor]  # [H] of each tap, or none


class DraftDecoder(Decoder):
    """Steps need `Batch.hidden`, and return the rows that the next draft goes on from."""

    most_drafts = MAX_DRAFT_TOKENS
    reads: tuple[int, ...] = ()  # layers of the model, see `Decoder.tap`; none: the rows that its logits are of
    _target_ids: Tensor | None = (
        None  # [draft vocabulary] int64, the model's ids of its tokens; None: they are the same
    )

    def go_to(self, depth: int) -> None:
        """The next logits are of a draft after so many others."""

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._widen(super().logits(self._before_head(hidden)))

    @torch.inference_mode()
    def own_logits(self, hidden: Tensor) -> Tensor:
        return self._widen(super().own_logits(self._before_head(hidden)))

    def _before_head(self, hidden: Tensor) -> Tensor:
        """[S, H] rows |-> what the product to logits takes."""
        raise NotImplementedError

    def _widen(self, logits: Tensor) -> Tensor:
        """[n, draft vocabulary] |-> [n, V]"""
        if self._target_ids is None:
            return logits
        wide = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return wide.index_copy_(1, self._target_ids, logits)


class HeadDecoder(DraftDecoder):
    """A layer with KV of its own, which follows each of the model's steps."""

    def __init__(
        self, config: ModelConfig, head: DraftHead, embedding: Embedding, layer: DecoderLayer, final_norm: Tensor,
        lm_head: Linear, ops: Ops, ranks: Ranks, inputs: HeadInputs, target_ids: Tensor | None,
    ) -> None:  # fmt: skip
        """target_ids: see `_target_ids`."""
        super().__init__(config, embedding, [layer], final_norm, lm_head, ops, ranks)
        self.head, self.reads = head, head.taps
        self._inputs = inputs
        self._target_ids = target_ids

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """The model's rows [T, N H] as `Batch.taps` has them |-> [T, H] for `Batch.hidden`."""
        inputs, eps = self._inputs, self.config.rms_eps
        if self.head.kind == "mtp":
            return taps
        if inputs.input_norm is not None:
            taps = self.ops.norm(taps, inputs.input_norm, eps)
        if inputs.tap_norms:
            parts = zip(taps.view(len(taps), -1, self.head.tap_size).unbind(1), inputs.tap_norms, strict=True)
            taps = torch.cat([self.ops.norm(part.contiguous(), norm, eps) for part, norm in parts], 1)
        return inputs.fc(taps)

    def embed(
        self, token_ids: Tensor, rope_positions: Tensor, hidden: Tensor | None = None,
        embedded: EmbeddedRows | None = None,
    ) -> Flow:  # fmt: skip
        assert hidden is not None, "a draft head without hidden rows"
        before = self._layers[0].before_attention
        if self.head.kind == "mtp":
            joined = self._join(token_ids, hidden)
            return Flow(joined.float(), self._norm(joined, before), self._rotations(rope_positions), None)
        tokens, normed = self._embed_tokens(token_ids), self._norm(hidden, self._inputs.hidden_norm)
        sums = (normed if self.head.norm_before_residual else hidden).float()
        return Flow(sums, torch.cat((self._norm(tokens, before), normed), 1), self._rotations(rope_positions), None)

    def _join(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[T], [T, H] |-> [T, H] the layer's rows (MTP)."""
        inputs, embedded = self._inputs, self._embed_tokens(token_ids)
        normed = self._norm(embedded, inputs.embedding_norm), self._norm(hidden, inputs.hidden_norm)
        return inputs.fc(torch.cat(normed, 1))

    def _leave(self, flow: Flow) -> Tensor:
        return flow.normed if self.head.norm_output else flow.sums.to(self.dtype)

    def _before_head(self, hidden: Tensor) -> Tensor:
        return hidden if self.head.norm_output else self._norm(hidden, self._final_norm)
