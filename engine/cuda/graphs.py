"""Decode steps as captured graphs: one launch for the forward, one for sampling and the write of tokens to the rows.

Graphs exist for a few numbers of sequences and of new tokens per sequence. A step uses the next larger one; surplus
rows work on a page and a row of tokens that belong to no sequence. `CudaCapture` alone knows CUDA: any `Capture` works.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from engine.adapters.rows import NO_SLOT, AdapterTiles
from engine.adapters.slots import StepTiles
from engine.attention.base import AttentionBackend
from engine.batch import Batch, Layout, Prepared, States
from engine.cuda.field_ops import FieldOps
from engine.cuda.fields import SamplingTensors, to_bytes
from engine.cuda.graph_shapes import Shape
from engine.cuda.static_block import StaticBlock
from engine.input_batch import InputBatch
from engine.models.decoder import Decoder
from engine.runner import Follower
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import PARAMS, to_row
from engine.staging import Ints, upload
from wire.sampling import SamplingParams

MAX_BIASES = 4096  # logit_bias entries of a step that a graph can take
RAW = np.dtype((np.void, PARAMS.itemsize))  # numpy copies it three times as fast as PARAMS
NUM_WARM_UPS = 2  # before a capture: compiles and loads kernels, allocates library workspaces

Compute = Callable[[], None]
Capture = Callable[[Compute], Compute]
"""Takes a function that only launches; returns one that repeats it on the same tensors."""
OnCaptured = Callable[[int, int], None]  # (graphs done, graphs in all)


class CudaCapture:
    """Captures CUDA graphs that share one memory pool: only one of them may run at a time."""

    def __init__(self) -> None:
        # priority -1: their kernels go before those that copy pages beside them
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # torch's handle, from the first graph

    def __call__(self, compute: Compute) -> Compute:
        """See `Capture`. Other threads may use the GPU meanwhile."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        self._pool = graph.pool()
        return graph.replay


class DecodeGraph:
    """Owns the inputs and outputs of one captured step of one shape. `hidden`: [R, H], until the next replay.

    The rows of a sequence are its last positions. If it has fewer new tokens than the shape, the step also recomputes
    tokens before them and drops their results:

        rows of a sequence:  [ tokens before, KV to the padding page | new tokens ]
    """

    def __init__(
        self,
        shape: Shape,
        model: Decoder,
        attention: AttentionBackend,
        pages: Tensor,
        rows: InputBatch,
        padding_page: int,
        has_adapters: bool,
        follower: Follower,
        carried: Tensor | None,
    ) -> None:
        """padding_page: a page that no sequence has. has_adapters: of rows.

        follower, carried: see `Runner`.
        """
        self.shape = shape
        self._model, self._pages, self._rows = model, pages, rows
        width = rows.page_table.shape[1]
        sizes = shape.num_sequences, shape.num_tokens, shape.num_sequences * width
        self._attention = attention.for_graph(*sizes)
        self._follower, self._carried = follower.for_graph(*sizes), carried
        device, num_rows = rows.device, shape.num_sequences * shape.num_tokens
        self._counts_rows = model.config.counts_rows
        self._block = StaticBlock(_build_padding(shape, rows, padding_page), device)
        self._has_adapters = has_adapters
        self._page_table = torch.full((shape.num_sequences, width), padding_page, dtype=torch.int32, device=device)
        self._last_table: NDArray[np.int32] | None = None  # last content of `_page_table`
        self._masks = torch.full((num_rows, -(-rows.vocab_size // 32)), -1, dtype=torch.int32, device=device)
        self._mask_lines = StaticBlock({"mask_line": np.full(num_rows, -1, np.int32)}, device)
        self._has_masks = False  # some line of `_mask_lines` names a mask
        self._biases = StaticBlock(
            {"ids": np.zeros(MAX_BIASES, np.int32), "values": np.zeros(MAX_BIASES, np.float32)}, device
        )
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(num_rows, model.config.hidden_size, dtype=model.dtype, device=device)
        self._places, self._answer_places = map(self._block.tensor, ("places", "answer_places"))
        self._row_ids, self._num_drafts = map(self._block.tensor, ("rows", "num_drafts"))
        self._batch = self._build_batch(num_rows)
        self._sampling = self._build_sampling(num_rows)
        own = model.ranks.own_rows(num_rows)  # tokens that this rank samples
        self._own_sampling, self._own_tokens = self._sampling.take(own), self._tokens[own]
        self._replay_forward: Compute = self._forward
        self._replay_sampling: Compute = self._sample

    def _build_batch(self, num_rows: int) -> Batch:
        take, (num_sequences, num_tokens) = self._block.tensor, self.shape
        every = torch.arange(num_rows + 1, device=self._rows.device)
        tiles = AdapterTiles(take("adapter_rows"), take("adapter_tiles").view(-1, 3))
        batch = Batch(
            token_ids=self._places,  # `_forward` replaces it by the tokens
            places=self._places,
            positions=take("positions"),
            rope_positions=take("rope_positions") if self._counts_rows else None,
            cu_seqlens_q=every[::num_tokens].to(torch.int32),
            seq_lens=take("seq_lens"),
            page_table=self._page_table,
            slot_mapping=take("slot_mapping"),
            logits_rows=every[:-1].clone(),
            query_lens_host=np.full(num_sequences, num_tokens, np.int32),
            seq_lens_host=np.full(num_sequences, num_tokens, np.int32),
            states=States(self._rows.states, take("state_from"), take("state_to")) if self._rows.states else None,
            additions=(tiles, tiles) if self._has_adapters else None,
        )
        return self._follower.add_taps(batch)

    def _build_sampling(self, num_rows: int) -> SamplingTensors:
        take, nothing = self._block.tensor, torch.zeros(1, dtype=torch.int32, device=self._rows.device)
        return SamplingTensors(
            params=take("params"),
            positions=take("answer_positions"),
            counts_line=take("counts_line"),
            bias_starts=take("bias_starts"),
            mask_line=self._mask_lines.tensor("mask_line"),
            counts=self._rows.counts,
            extra_starts=nothing.expand(num_rows + 1).contiguous(),
            extra_ids=nothing,
            bias_ids=self._biases.tensor("ids"),
            bias_values=self._biases.tensor("values"),
            masks=self._masks,
        )

    def capture(self, capture: Capture) -> None:
        """Call once, before the first replay. Works on padding alone."""
        with self._block.fill():
            pass
        self._plan(self._batch)
        self._replay_forward = capture(self._forward)
        self._replay_sampling = capture(self._sample)

    def forward(self, step: Prepared) -> Ints:
        """Launch the forward of a step that fits. Returns each output's row among the shape's, [S]."""
        layout, outputs, sampling = step.layout, step.outputs, step.chunks[0].sampling
        num_sequences, num_tokens = len(layout.query_lens), self.shape.num_tokens
        rows = np.arange(len(layout.places))  # rows of the new tokens
        if num_tokens > 1:
            ends = np.arange(1, num_sequences + 1) * num_tokens
            rows += np.repeat(ends - layout.cu_seqlens_q[1:], layout.query_lens)
        outs = rows[layout.logits_rows]
        self._fill_page_table(layout.page_table)
        with self._block.fill() as arrays:
            if num_tokens > 1:
                self._fill_before(arrays, layout)
            for name in ("places", "positions", "slot_mapping"):
                arrays[name][rows] = getattr(layout, name)
            if self._counts_rows:
                arrays["rope_positions"][rows] = layout.rope_positions
            arrays["seq_lens"][:num_sequences] = layout.seq_lens
            arrays["answer_places"][outs], arrays["answer_positions"][outs] = outputs.places, sampling.positions
            arrays["params"].view(RAW)[:, 0][outs] = sampling.params.view(RAW)
            if sampling.counts_line is not None:
                arrays["counts_line"][outs] = sampling.counts_line
            arrays["state_from"][: layout.slots.shape[1]], arrays["state_to"][: layout.slots.shape[1]] = layout.slots
            arrays["rows"][:num_sequences] = layout.places[layout.cu_seqlens_q[:-1]] // self._rows.width
            arrays["num_drafts"][:num_sequences] = step.num_drafts
            self._fill_biases(arrays["bias_starts"], sampling, outs)
            if (adapted := find_tiles(layout)) is not None:
                tokens = adapted.tokens  # all rows of the shape have logits, so they are those of the outputs too
                arrays["adapter_rows"][: len(tokens.rows)] = rows[tokens.rows]
                arrays["adapter_tiles"][: tokens.tiles.size] = tokens.tiles.reshape(-1)
            seq_lens = arrays["seq_lens"].copy()
        self._plan(replace(self._batch, seq_lens_host=seq_lens))
        self._replay_forward()
        return outs

    def _plan(self, batch: Batch) -> None:
        self._attention.plan(self._pages, batch)
        self._follower.plan(batch)

    def choose(self, step: Prepared, outs: Ints) -> Tensor:
        """Launch the rest of the last `forward`'s step, given the same step, perhaps with masks, and its rows.

        Returns the sampled tokens, [S] int64. Logits are not kept: a tensor that a graph made and that lives on would
        keep its memory from the other graphs.
        """
        self._fill_masks(step.chunks[0].sampling, outs)
        self._replay_sampling()
        num_sequences = len(step.layout.query_lens)
        if len(outs) == num_sequences and self.shape.num_tokens == 1:
            return self._tokens[:num_sequences].clone()
        return self._tokens.index_select(0, upload([outs], self._tokens.device)[0])

    def _fill_masks(self, sampling: SamplingBatch, outs: Ints) -> None:
        if sampling.masks is None and not self._has_masks:
            return
        self._has_masks = sampling.masks is not None
        with self._mask_lines.fill() as arrays:
            if sampling.mask_line is not None:
                arrays["mask_line"][outs] = sampling.mask_line
        if sampling.masks is not None:
            (masks,) = upload([sampling.masks], self._masks.device)
            self._masks[: len(masks)].copy_(masks)

    def _fill_before(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> None:
        """Fill all rows as if the new tokens filled the shape; `forward` then overwrites those of new tokens."""
        num_sequences, num_tokens = len(layout.query_lens), self.shape.num_tokens
        steps = np.arange(-num_tokens, 0)
        lasts = layout.cu_seqlens_q[1:] - 1  # last new token of each sequence
        filled = {"positions": layout.positions, "places": layout.places}
        if self._counts_rows:
            filled["rope_positions"] = layout.rope_positions
        for name, values in filled.items():
            before = values[lasts, None] + 1 + steps  # [B, num_tokens]
            arrays[name][: num_sequences * num_tokens] = before.reshape(-1)

    def _fill_page_table(self, table: NDArray[np.int32]) -> None:
        """Padding rows read their first page, which exists."""
        if self._last_table is None or not np.array_equal(self._last_table, table):
            (pages,) = upload([table], self._page_table.device)
            self._page_table[: len(table), : table.shape[1]].copy_(pages)
            self._last_table = table

    def _fill_biases(self, starts: NDArray[np.int32], sampling: SamplingBatch, outs: Ints) -> None:
        """starts: [R + 1] of all rows, to be filled."""
        if sampling.bias_starts is None or sampling.bias_ids is None or sampling.bias_values is None:
            return
        counts = np.zeros(len(starts) - 1, np.int32)
        counts[outs] = np.diff(sampling.bias_starts)
        np.cumsum(counts, out=starts[1:])
        with self._biases.fill() as arrays:
            arrays["ids"][: len(sampling.bias_ids)] = sampling.bias_ids
            arrays["values"][: len(sampling.bias_values)] = sampling.bias_values

    @torch.inference_mode()
    def _forward(self) -> None:
        """Only launches; reads and writes only tensors that outlive the step."""
        batch = replace(self._batch, token_ids=self._read_tokens())
        if self._carried is not None:
            batch = replace(batch, hidden=self._carried.index_select(0, self._row_ids))
        self.hidden.copy_(self._model.run_planned(batch, self._attention))
        if self._carried is not None:
            self._carried.index_copy_(0, self._row_ids, self.hidden)

    def _read_tokens(self) -> Tensor:
        """[R] the step's new tokens."""
        return self._rows.flat_tokens.index_select(0, self._places).long()

    @torch.inference_mode()
    def _sample(self) -> None:
        """Like `_forward`, which it follows."""
        rows, tokens = self._rows, self._tokens
        logits = self._model.own_logits(self.hidden)
        if len(self._own_tokens):
            self._model.ops.find(FieldOps).sample_into(self._own_tokens, logits, self._own_sampling)
        if self._model.ranks.size > 1:
            tokens.copy_(self._model.ranks.gather_rows(self._own_tokens, len(tokens)))
        lasts = self._follower.find_lasts(
            lambda: self._read_tokens().view(self.shape), tokens.view(self.shape), self._num_drafts
        )  # fmt: skip
        rows.flat_tokens.index_copy_(0, self._answer_places, tokens.clamp(min=0).to(torch.int32))
        self._follower.run(self._batch, self.hidden, lasts, self._row_ids)


def _build_padding(shape: Shape, rows: InputBatch, page: int) -> dict[str, NDArray[Any]]:
    """The inputs of a row without a sequence: token 0 of the row after all others, alone on its own page.

    Its state goes to the last slot, which no sequence has.
    """
    place, size = rows.num_rows * rows.width, shape.num_sequences * shape.num_tokens

    def repeat(value: float, dtype: DTypeLike) -> NDArray[Any]:
        return np.full(size, value, dtype)

    return {
        "places": repeat(place, np.int64),
        "positions": repeat(0, np.int64),
        "rope_positions": repeat(0, np.int64),
        "seq_lens": np.full(shape.num_sequences, shape.num_tokens, np.int32),
        "slot_mapping": repeat(page * rows.page_tokens, np.int64),
        "rows": np.full(shape.num_sequences, rows.num_rows, np.int64),
        "num_drafts": np.zeros(shape.num_sequences, np.int64),
        "state_from": np.full(shape.num_sequences, -1, np.int64),
        "state_to": np.full(shape.num_sequences, len(rows.states[0]) - 1 if rows.states else 0, np.int64),
        "answer_places": repeat(place + 1, np.int64),
        "answer_positions": repeat(1, np.int64),
        "params": to_bytes(np.full(size, np.array(to_row(SamplingParams(temperature=0.0)), PARAMS))),
        "counts_line": repeat(-1, np.int32),
        "bias_starts": np.zeros(size + 1, np.int32),
        "adapter_rows": repeat(0, np.int32),
        "adapter_tiles": np.full(3 * size, NO_SLOT, np.int32),  # at most a tile a row
    }


def find_tiles(layout: Layout) -> StepTiles | None:
    """Tiles of the step's adapters; None without adapters."""
    return next((feature for feature in layout.features if isinstance(feature, StepTiles)), None)


class DecodeGraphs:
    """Owns a model's graphs, which share their rows."""

    def __init__(
        self,
        shapes: Collection[Shape],
        model: Decoder,
        attention: AttentionBackend,
        pages: Tensor,
        rows: InputBatch,
        padding_page: int,
        capture: Capture,
        on_progress: OnCaptured,
        follower: Follower,
        carried: Tensor | None,
    ) -> None:
        """Captures all, the largest first, so that the others fit into its memory. Parameters: see `DecodeGraph`."""
        rows.reserve_counts()
        self._graphs: dict[tuple[Shape, bool], DecodeGraph] = {}  # shape, whether rows have adapters
        kinds = [False, True] if model.additions.num_slots else [False]
        for shape in sorted(shapes, key=prod, reverse=True):
            for kind in kinds:
                graph = DecodeGraph(shape, model, attention, pages, rows, padding_page, kind, follower, carried)
                graph.capture(capture)
                self._graphs[shape, kind] = graph
            on_progress(len(self._graphs) // len(kinds), len(shapes))
        self.shapes = sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_sequences))

    def find(self, step: Prepared) -> DecodeGraph | None:
        """The smallest graph for the step. None if none is large enough or can do what the step asks for."""
        layout, num_sequences = step.layout, len(step.layout.query_lens)
        num_tokens = 1 if len(layout.places) == num_sequences else int(layout.query_lens.max())
        if len(step.chunks) != 1 or not all(feature.is_capturable for feature in layout.features):
            return None
        chunk = step.chunks[0]
        num_biases = 0 if chunk.sampling.bias_ids is None else len(chunk.sampling.bias_ids)
        if chunk.chosen is not None or chunk.drafts is not None or num_biases > MAX_BIASES:
            return None
        least = int(layout.seq_lens.min())
        for shape in self.shapes:
            if shape.num_tokens >= num_tokens and shape.num_sequences >= num_sequences:
                is_long_enough = shape.num_tokens == 1 or least >= shape.num_tokens
                return self._graphs[shape, find_tiles(layout) is not None] if is_long_enough else None
        return None
