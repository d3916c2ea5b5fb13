"""Steps with prompts as captured graphs in pieces: everything between two calls of attention is one launch.

Attention of prompts cannot be captured: its launches follow from lengths. A step takes the next larger number of
tokens; surplus rows compute what nothing reads.

    piece 0: embedding .. heads of layer 0 | attend | piece 1: rest of layer 0 .. heads of layer 1 | attend | ...

After the last attention only rows with logits matter, so the rest of the last layer is launched kernel by kernel.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV, Attend
from engine.batch import Batch
from engine.cuda.graphs import Capture, Compute
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Flow

FEWEST = 65  # tokens: products of fewer rows may be other kernels (gpu_linear.MAX_ROWS)


class Buffers(NamedTuple):
    """Tensors that pieces pass to each other, for T tokens."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    sums: Tensor  # [T, H] float32
    query_key: Tensor  # [T, Hq + Hkv, D]
    value: Tensor  # [T, Hkv, D]
    attended: Tensor  # [T, Hq, D]

    def first(self, num_tokens: int) -> "Buffers":
        """Views of the first tokens."""
        return Buffers._make(one[:num_tokens] for one in self)


def build_buffers(num_tokens: int, model: Decoder) -> Buffers:
    shape = model.config.attention_shapes[0]

    def zeros(*sizes: int, dtype: torch.dtype = model.dtype) -> Tensor:
        return torch.zeros(num_tokens, *sizes, dtype=dtype, device=model.device)

    return Buffers(
        zeros(dtype=torch.int64), zeros(dtype=torch.int64), zeros(model.config.hidden_size, dtype=torch.float32),
        zeros(shape.num_heads + shape.num_kv_heads, shape.head_dim), zeros(shape.num_kv_heads, shape.head_dim),
        zeros(shape.num_heads, shape.head_dim),
    )  # fmt: skip


class PieceGraph:
    """The pieces of steps with up to `num_tokens` tokens."""

    def __init__(self, buffers: Buffers, model: Decoder) -> None:
        """buffers: for `num_tokens`; graphs that run in turn may share them."""
        self.num_tokens, self._model = len(buffers.token_ids), model
        self._token_ids, self._positions, self._sums, self._query_key, self._value, self._attended = buffers
        self._rotations: list[tuple[Tensor, Tensor]] = []
        self._wanted: dict[int, Attend] = {}
        self._replays: list[Compute] = []

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Call once."""
        rotations = self._model.embed(self._token_ids, self._positions).rotations
        self._rotations = [(cos.clone(), sin.clone()) for cos, sin in rotations]
        self._replays = [capture(partial(self._run_piece, index)) for index in range(self._model.config.num_layers)]

    @torch.inference_mode()
    def _run_piece(self, index: int) -> None:
        """Only launches, on tensors that outlive the step."""
        model = self._model
        if index:
            flow = Flow(self._sums, self._sums, self._rotations, None)
            model.finish_layer(index - 1, flow, self._attended, None)
        else:
            flow = model.embed(self._token_ids, self._positions)
            self._sums.copy_(flow.sums)
            for kept, new in zip(self._rotations, flow.rotations, strict=True):
                for one, other in zip(kept, new, strict=True):
                    one.copy_(other)
        flow.rotations = self._rotations
        wanted = model.project(index, flow)
        self._query_key.copy_(wanted.heads.query_key)
        self._value.copy_(wanted.heads.value)
        own = QKV(self._query_key, self._value, wanted.heads.rope)  # those of the layer would stay in memory
        self._wanted[index] = wanted._replace(heads=own)

    def run(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """See `Decoder.run_planned`. The batch has at most `num_tokens` tokens."""
        model, count = self._model, len(batch.token_ids)
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions if batch.rope_positions is None else batch.rope_positions)
        for index, replay in enumerate(self._replays):
            replay()
            model.write_taps(index, self._sums[:count], batch)
            wanted = self._wanted[index]
            rope = wanted.heads.rope
            if rope is not None:
                cos, sin = (table[:count] for table in (rope.cos, rope.signed_sin))
                rope = rope._replace(cos=cos, signed_sin=sin)
            heads = QKV(self._query_key[:count], self._value[:count], rope)
            attended = attention.attend(wanted.layer, heads, wanted.window, wanted.sinks)
            if model.is_done(index, batch):
                return attended.new_empty(0, model.config.hidden_size)
            self._attended[:count].copy_(attended)
        flow = Flow(self._sums[:count], self._sums[:count], self._rotations, None)
        return model.finish(flow, self._attended[:count], batch)


def has_equal_pieces(config: ModelConfig) -> bool:
    """Whether all layers ask attention for as many heads, and only products depend on the number of rows."""
    is_alike = len(set(config.attention_shapes)) == 1 and len(config.kv_layers) == config.num_layers
    is_plain = config.token_kv is None and not config.has_output_gate and config.token_inputs is None
    return is_alike and is_plain and config.moe is None


class PieceGraphs:
    """Owns a model's pieces."""

    def __init__(
        self, sizes: Collection[int], model: Decoder, capture: Capture, on_captured: Callable[[], None]
    ) -> None:
        """Captures all, the largest first, so that the others fit into its memory."""
        self._graphs: list[PieceGraph] = []  # the smallest first
        buffers = build_buffers(max(sizes), model)
        for size in sorted(sizes, reverse=True):
            graph = PieceGraph(buffers.first(size), model)
            graph.capture(capture)
            self._graphs.insert(0, graph)
            on_captured()

    def find(self, num_tokens: int) -> PieceGraph | None:
        """The smallest graph for so many tokens."""
        if num_tokens < FEWEST:
            return None
        return next((graph for graph in self._graphs if graph.num_tokens >= num_tokens), None)
