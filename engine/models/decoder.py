"""The decoder of all native families: one ragged batch in, hidden rows and logits out.

The order of operations is transformers'. The backend decides how attention accesses pages, `Linear` the memory layout
of weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV, Attend, RopeArgs, Rotations
from engine.batch import Batch, EmbeddedRows
from engine.layers.linear import NO_ADDITIONS, Additions, Embedding, Linear, SummedLinear
from engine.layers.mixer import Mixer, Projection, StateRows
from engine.layers.rope import build_rope_tables
from engine.models.config import ModelConfig
from engine.models.width_norm import norm_width_
from engine.ops.base import Ops
from engine.ranks import ONE_RANK, Ranks
from wire.sampling import MAX_DRAFT_TOKENS

TokenInputs = Callable[[Tensor, Tensor], Tensor]  # [T] token ids, [T, H] first rows |-> [T, L, P] of all layers
InputBlock = Callable[[Tensor, Tensor], Tensor]  # [T, H], [T, P] of the layer |-> [T, H]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; query, key and value are one product, gate and up another. A norm is [H], or not there.

    Hkv is 0 in a layer that reads the keys and values of another. A layer with a mixer has no attention: qkv_proj
    gives the mixer's rows, o_proj takes what it returns.
    """

    before_attention: Tensor | None
    qkv_proj: Linear  # H -> all query heads, then key heads, then value heads, if they are others, then gates, if any
    qk_norm: Tensor | None  # [Hq + Hkv, D], the query norm's row Hq times, then the key norm's; or [1, (Hq + Hkv) D]
    sinks: Tensor | None  # [Hq] float32
    o_proj: Linear  # Hq D -> H
    after_attention: Tensor | None
    before_mlp: Tensor | None
    mlp: Linear  # H -> H: dense, or a mixture of experts
    after_mlp: Tensor | None
    input_block: InputBlock | None = None  # after the MLP
    after_input: Tensor | None = None
    scale: Tensor | None = None  # [1], of what leaves the layer
    mixer: Mixer | None = None
    projection: Projection | None = None  # from qkv_proj to attention; None: by heads


@dataclass(slots=True)
class Flow:
    """The values that a step passes from layer to layer."""

    sums: Tensor  # [T, H] float32: of layers, which 8 bits of mantissa would lose beside their outliers
    normed: Tensor  # [T, H] input of the next product
    rotations: Sequence[tuple[Tensor, Tensor]]  # of each rope
    inputs: Tensor | None  # [T, L, P]
    gates: Tensor | None = None  # [T, Hq, D] of the layer whose attention runs


class Decoder:
    """A loaded model. Holds weights only: the caller's pool holds all state of sequences."""

    is_capturable = True  # a CUDA graph can capture its steps, if it can capture attention

    def __init__(
        self, config: ModelConfig, embedding: Embedding, layers: Sequence[DecoderLayer],
        final_norm: Tensor | None, lm_head: Linear, ops: Ops, ranks: Ranks = ONE_RANK,
        token_inputs: TokenInputs | None = None, additions: Additions = NO_ADDITIONS,
    ) -> None:  # fmt: skip
        """config: of this rank's part. The embedding's dtype and device are the model's; final_norm: [H].

        lm_head: H -> this rank's part of the vocabulary, in float32.
        """
        self.config = config
        self.dtype, self.device = embedding.dtype, embedding.device
        self.embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self.lm_head = lm_head
        self._token_inputs = token_inputs
        self._last_writer = max((at for at, layer in enumerate(config.layers) if layer.kv_layer is None), default=0)
        self._places = config.find_places()
        self._shapes = [config.shape_of(layer) for layer in config.layers]
        self.ranks = ranks
        self.additions = additions
        self.mapped_bytes = 0  # bytes of packed weights mapped from a file
        self.why_unshared: str | None = None  # why each worker of this host has its own packed weights
        dims = {layer.rope: layer.head_dim or config.head_dim for layer in config.layers}
        head_dims = [dims.get(index, config.head_dim) for index in range(len(config.ropes))]
        num_positions = config.context_tokens + MAX_DRAFT_TOKENS  # drafts may follow a sequence at its limit
        tables = build_rope_tables(config.ropes, head_dims, num_positions, self.device, self.dtype)
        self._rotations = Rotations(tables, [rope.axes for rope in config.ropes])
        multiplier_dtype = self.dtype if config.rounds_multiplier else torch.float64
        self._embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=multiplier_dtype))
        self.ops = ops
        self.taps: tuple[int, ...] = ()

    def tap(self, layers: Sequence[int]) -> None:
        """From now on steps write the input rows of these layers, ascending, into `Batch.taps` where that is there; of
        the number of layers the last rows, normed."""
        self.taps = tuple(layers)
        self._last_writer = max(self._last_writer, *layers)

    def new_taps(self, num_tokens: int) -> Tensor:
        """[T, N H] for `Batch.taps`."""
        width = len(self.taps) * self.config.hidden_size
        return torch.empty(num_tokens, width, dtype=self.dtype, device=self.device)

    def write_taps(self, index: int, rows: Tensor, batch: Batch) -> None:
        """rows: [T, H] that enter a layer."""
        if batch.taps is not None and index in self.taps:
            size, place = self.config.hidden_size, self.taps.index(index)
            batch.taps[:, place * size : (place + 1) * size].copy_(rows)

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        """Run one step: write the KV of all new tokens into `pool`, and the states after them into the batch's; return
        the rows that `logits` needs.

        pool: axes as in wire.kv_layout, in the model's dtype; modifies only rows that the batch names. Positions must
        be below the context length. Returns [S, H], normed, for `batch.logits_rows`; [0, H] if S is 0.
        """
        attention.plan(pool, batch)
        return self.run_planned(batch, attention)

    def run_planned(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """`forward` after the plan. Only launches; shapes follow from those of `batch`."""
        with self.additions.during(batch):
            rope_positions = batch.positions if batch.rope_positions is None else batch.rope_positions
            flow = self.embed(batch.token_ids, rope_positions, batch.hidden, batch.embedded)
            for index, layer in enumerate(self._layers):
                self.write_taps(index, flow.sums, batch)
                if layer.mixer is None:
                    mixed = attention.attend(*self.project(index, flow))  # [T, Hq, D]
                else:
                    mixed = self._mix(index, layer.mixer, layer.qkv_proj(flow.normed), batch)
                if self.is_done(index, batch):
                    return flow.normed[:0]
                if index < len(self._layers) - 1:
                    self.finish_layer(index, flow, mixed, None)
                    if batch.embedded is not None:
                        self._add_deep(index, flow, batch.embedded)
            return self.finish(flow, mixed, batch)

    def finish(self, flow: Flow, attended: Tensor, batch: Batch) -> Tensor:
        """The last layer after attention |-> [S, H], what `logits` takes."""
        index = len(self._layers) - 1
        if batch.taps is None or index + 1 not in self.taps:
            self.finish_layer(index, flow, attended, batch.logits_rows)
            return self._leave(flow)
        self.finish_layer(index, flow, attended, None)
        self.write_taps(index + 1, flow.normed, batch)
        return _keep_rows(flow.normed, batch.logits_rows)

    def _leave(self, flow: Flow) -> Tensor:
        return flow.normed

    def _mix(self, index: int, mixer: Mixer, rows: Tensor, batch: Batch) -> Tensor:
        """Run the mixer of a layer without attention: [T, ...] of its first product |-> [T, N].

        Updates the batch's states.
        """
        assert batch.states is not None
        states, sources, targets = batch.states
        at = StateRows(sources, targets, batch.cu_seqlens_q, batch.query_lens_host)
        return mixer(rows, at, [part[:, :, self._places[index]] for part in states])

    def embed(
        self, token_ids: Tensor, rope_positions: Tensor, hidden: Tensor | None = None,
        embedded: EmbeddedRows | None = None,
    ) -> Flow:  # fmt: skip
        """[T], and [T] or [3, T] as in `Layout` |-> what the first layer gets. hidden, embedded: see `Batch`."""
        rows = self._embed_tokens(token_ids)
        if embedded is not None:
            rows.index_copy_(0, embedded.at, embedded.rows)
            token_ids = token_ids.index_fill(0, embedded.at, self.config.pad_token)
        return Flow(
            sums=rows.float(),
            normed=self._norm(rows, self._layers[0].before_attention),
            rotations=self._rotations(rope_positions),
            inputs=None if self._token_inputs is None else self._token_inputs(token_ids, rows),
        )

    def _embed_tokens(self, token_ids: Tensor) -> Tensor:
        """[T] |-> [T, H]"""
        rows = self.embedding(token_ids)
        return rows if self._embedding_multiplier == 1 else rows * self._embedding_multiplier

    def _add_deep(self, index: int, flow: Flow, embedded: EmbeddedRows) -> None:
        """Add the deep part of given rows after the layer, which is not the last."""
        if embedded.deep is not None and index < len(embedded.deep):
            flow.sums.index_add_(0, embedded.at, embedded.deep[index].float())
            flow.normed = self._norm(flow.sums.to(self.dtype), self._layers[index + 1].before_attention)

    def is_done(self, index: int, batch: Batch) -> bool:
        """Whether nothing after this layer's attention matters: all KV and states are written, no logits are wanted."""
        is_last = index == self._last_writer and not batch.logits_rows.numel()  # taps count as KV
        if is_last:
            self.ranks.barrier(self.device)  # no sum follows: this makes all ranks finish the step together
        return is_last

    def finish_layer(self, index: int, flow: Flow, attended: Tensor, rows: Tensor | None) -> None:
        """The layer after attention. attended: [T, Hq, D], or [T, N] without attention; rows: [S] the only ones that
        still matter; None: all."""
        layer, inputs = self._layers[index], flow.inputs
        is_last = index == len(self._layers) - 1
        next_norm = self._final_norm if is_last else self._layers[index + 1].before_attention
        if flow.gates is not None:
            attended, flow.gates = attended * flow.gates.sigmoid(), None
        attended = attended.view(len(attended), -1)  # [T, Hq D]
        if rows is not None:
            attended, flow.sums = _keep_rows(attended, rows), _keep_rows(flow.sums, rows)  # [S, ...]
            inputs = None if inputs is None else _keep_rows(inputs, rows)
            self.additions.keep_outputs()
        sums = flow.sums
        flow.normed = self._add_product(sums, layer.o_proj, attended, layer.after_attention, layer.before_mlp)
        if layer.input_block is not None and inputs is not None:
            normed = self._add(sums, layer.mlp(flow.normed), layer.after_mlp, None)
            delta = layer.input_block(normed, inputs[:, index])
            flow.normed = self._add(sums, delta, layer.after_input, next_norm, layer.scale)
        else:
            flow.normed = self._add_product(sums, layer.mlp, flow.normed, layer.after_mlp, next_norm, layer.scale)

    def _norm(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        return rows if weight is None else self.ops.norm(rows, weight, self.config.rms_eps)

    def _add_product(
        self, hidden: Tensor, product: Linear, rows: Tensor, after: Tensor | None, before: Tensor | None,
        scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`_add` of product(rows)."""
        is_plain = after is None and scale is None and self.config.residual_multiplier == 1
        if isinstance(product, SummedLinear) and is_plain and before is not None:
            return product.add_norm_(hidden, rows, before, self.config.rms_eps, self.ops)
        return self._add(hidden, product(rows), after, before, scale)

    def _add(
        self, hidden: Tensor, delta: Tensor, after: Tensor | None, before: Tensor | None, scale: Tensor | None = None
    ) -> Tensor:
        """Add a block's normed output to `hidden` in place, [T, H] float32, and scale the sum; returns the next block's
        normed input in the model's dtype."""
        delta = self._norm(delta, after)
        if self.config.residual_multiplier != 1:
            delta = delta * self.config.residual_multiplier
        if scale is not None:
            return self._norm(hidden.add_(delta).mul_(scale).to(self.dtype), before)
        if before is None:
            return hidden.add_(delta).to(self.dtype)
        return self.ops.add_norm_(hidden, delta, before, self.config.rms_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] rows from `forward`, or some of them |-> [S, V] float32, owned by the caller."""
        logits = self.lm_head(hidden)
        return self._scale_logits(logits if self.ranks.size == 1 else self.ranks.all_gather(logits))

    @torch.inference_mode()
    def own_logits(self, hidden: Tensor) -> Tensor:
        """Like `logits`, but only for the rows whose tokens this rank samples (`Ranks.own_rows`): [m, V]."""
        return self._scale_logits(self.ranks.all_to_all(self.lm_head(hidden)))

    def _scale_logits(self, logits: Tensor) -> Tensor:
        if self.config.logits_divisor != 1:
            logits = logits.div_(self.config.logits_divisor)
        if softcap := self.config.logits_softcap:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        return logits

    def project(self, index: int, flow: Flow) -> Attend:
        """The layer before attention."""
        config, own, shape, layer = self.config, self.config.layers[index], self._shapes[index], self._layers[index]
        num_new = shape.num_kv_heads if own.kv_layer is None else 0
        qkv = layer.qkv_proj(flow.normed)  # [T, (Hq + 2 Hkv) D]
        if layer.projection is not None:
            new = layer.projection(qkv, *flow.rotations[own.rope or 0])
            return Attend(self._places[index], new, own.window, layer.sinks)
        qk_norm = layer.qk_norm
        if config.qk_norm == "width" and qk_norm is not None:
            norm_width_(qkv, qk_norm, config, self.ranks)
            qk_norm = None
        heads = qkv.view(len(qkv), qkv.shape[1] // shape.head_dim, shape.head_dim)
        if config.has_output_gate:
            heads, flow.gates = heads[:, : -shape.num_heads], heads[:, -shape.num_heads :]
        value = heads[:, heads.shape[1] - num_new :]
        if config.has_v_norm and num_new:
            value = functional.rms_norm(value, value.shape[-1:], None, config.rms_eps)
        rope = None if own.rope is None else RopeArgs(*flow.rotations[own.rope], qk_norm, config.rms_eps)
        new = QKV(heads[:, : shape.num_heads + num_new], value, rope)
        return Attend(self._places[index], new, own.window, layer.sinks)


def _keep_rows(rows: Tensor, wanted: Tensor) -> Tensor:
    """[T, N] |-> [S, N]; the same tensor if all rows are wanted, as in every plain decode step."""
    return rows if wanted.numel() == rows.shape[0] else rows.index_select(0, wanted)
