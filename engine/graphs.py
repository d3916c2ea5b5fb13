"""Plain decode steps as captured graphs: one launch for the forward, the choice of tokens and their write to the rows.

A graph exists for a few numbers of sequences; a step takes the next larger one, and rows that it has too many work on
a page and a row of tokens that no sequence has. Knows nothing of CUDA but `CudaCapture`: any `Capture` will do.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.model.decoder import Decoder
from engine.prepared import Prepared
from engine.rows import Rows
from engine.sampling import choose_tokens
from engine.sampling_batch import SamplingBatch
from engine.sampling_tensors import SamplingTensors
from engine.staging import upload
from engine.static_block import StaticBlock

DENSE_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seeds", "repetition", "frequency", "presence")
LINE_FIELDS = ("counts_line", "mask_line")
MAX_BIASES = 4096  # entries of logit_bias in a step that a graph takes
NUM_WARM_UPS = 2  # before a capture: kernels are compiled and loaded, libraries take their workspaces

Compute = Callable[[], None]
Capture = Callable[[Compute], Compute]
"""Runs a function that only launches, and returns what repeats it on the same tensors."""
OnCaptured = Callable[[int, int], None]  # (graphs done, graphs in all)


def choose_sizes(max_rows: int) -> list[int]:
    """Numbers of sequences to have graphs for, ascending: powers of two up to `max_rows`, and that."""
    return [*(1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows), max_rows]


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory: only one of them may run at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None  # torch's handle, of the first graph

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
    """Owns the inputs and outputs of one captured step of exactly `size` rows."""

    def __init__(
        self, size: int, model: Decoder, attention: AttentionBackend, pages: Tensor, rows: Rows, padding_page: int
    ) -> None:
        """padding_page: one that no sequence has."""
        self.size = size
        self._model, self._pages, self._rows = model, pages, rows
        width = rows.page_table.shape[1]
        self._attention = attention.for_graph(size, size * width)
        device = rows.device
        self._block = StaticBlock(_build_padding(size, rows, padding_page), device)
        self._page_table = torch.full((size, width), padding_page, dtype=torch.int32, device=device)
        self._last_table: NDArray[np.int32] | None = None  # what `_page_table` was filled with
        self._masks = torch.full((size, -(-rows.vocab_size // 32)), -1, dtype=torch.int32, device=device)
        self._biases = StaticBlock(
            {"ids": np.zeros(MAX_BIASES, np.int32), "values": np.zeros(MAX_BIASES, np.float32)}, device
        )
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._logits = torch.zeros(0)
        self._places, self._answer_places = map(self._block.tensor, ("places", "answer_places"))
        self._batch = self._build_batch()
        self._sampling = self._build_sampling()
        self._replay: Compute = self._compute

    def _build_batch(self) -> Batch:
        take, ones = self._block.tensor, np.ones(self.size, np.int32)
        starts = torch.arange(self.size + 1, device=self._rows.device)
        return Batch(
            token_ids=self._places,  # until `_compute` reads the tokens there
            positions=take("positions"),
            query_starts=starts.to(torch.int32),
            context_lens=take("context_lens"),
            page_table=self._page_table,
            write_pages=take("write_pages"),
            write_offsets=take("write_offsets"),
            logits_rows=starts[:-1].clone(),
            query_lens_host=ones,
            context_lens_host=ones,
        )

    def _build_sampling(self) -> SamplingTensors:
        take, nothing = self._block.tensor, torch.zeros(1, dtype=torch.int32, device=self._rows.device)
        return SamplingTensors(
            **{name: take(name) for name in (*DENSE_FIELDS, *LINE_FIELDS, "bias_starts")},
            positions=take("answer_positions"),
            counts=self._rows.counts,
            extra_starts=nothing.expand(self.size + 1).contiguous(),
            extra_ids=nothing,
            bias_ids=self._biases.tensor("ids"),
            bias_values=self._biases.tensor("values"),
            masks=self._masks,
        )

    def capture(self, capture: Capture) -> None:
        """Once, before the first replay. Works on padding alone."""
        self._block.fill({})
        self._attention.plan(self._pages, self._batch)
        self._replay = capture(self._compute)

    def replay(self, step: Prepared) -> tuple[Tensor, Tensor]:
        """Run a step of n sequences that fits. Returns [n] int64 chosen tokens, [n, V] logits as the model gave them.

        The logits last until the next replay.
        """
        layout, outputs, sampling = step.layout, step.outputs, step.pieces[0].sampling
        num_rows = len(layout.places)
        self._fill_page_table(layout.page_table)
        if sampling.masks is not None:
            (masks,) = upload([sampling.masks], self._masks.device)
            self._masks[: len(masks)].copy_(masks)
        self._block.fill(
            {
                "places": layout.places,
                "positions": layout.positions,
                "context_lens": layout.context_lens,
                "write_pages": layout.write_pages,
                "write_offsets": layout.write_offsets,
                "answer_places": outputs.places,
                "answer_positions": sampling.positions,
                **{name: getattr(sampling, name) for name in DENSE_FIELDS},
                **{name: own for name in LINE_FIELDS if (own := getattr(sampling, name)) is not None},
                **self._fill_biases(sampling),
            }
        )
        context_lens = np.ones(self.size, np.int32)
        context_lens[:num_rows] = layout.context_lens
        self._attention.plan(self._pages, replace(self._batch, context_lens_host=context_lens))
        self._replay()
        return self._tokens[:num_rows].clone(), self._logits[:num_rows]

    def _fill_page_table(self, table: NDArray[np.int32]) -> None:
        """Rows of padding read their first page: it exists. Steps over the same pages have the same object."""
        if self._last_table is not table:
            (pages,) = upload([table], self._page_table.device)
            self._page_table[: len(table), : table.shape[1]].copy_(pages)
            self._last_table = table

    def _fill_biases(self, sampling: SamplingBatch) -> dict[str, NDArray[np.int32]]:
        if sampling.bias_starts is None or sampling.bias_ids is None or sampling.bias_values is None:
            return {}
        self._biases.fill({"ids": sampling.bias_ids, "values": sampling.bias_values})
        starts = np.full(self.size + 1, sampling.bias_starts[-1], np.int32)
        starts[: len(sampling.bias_starts)] = sampling.bias_starts
        return {"bias_starts": starts}

    @torch.inference_mode()
    def _compute(self) -> None:
        """Launches only; reads and writes nothing but what lasts."""
        rows = self._rows
        token_ids = rows.flat_tokens.index_select(0, self._places).long()
        hidden = self._model.run_planned(replace(self._batch, token_ids=token_ids), self._attention)
        self._logits = self._model.logits(hidden)
        choose_tokens(self._logits, self._sampling, self._tokens)
        rows.flat_tokens.index_copy_(0, self._answer_places, self._tokens.to(torch.int32))


def _build_padding(size: int, rows: Rows, page: int) -> dict[str, NDArray[Any]]:
    """What a row does that has no sequence: token 0 of the row behind all others, alone on a page of its own."""
    place = rows.num_rows * rows.width

    def repeat(value: float, dtype: DTypeLike) -> NDArray[Any]:
        return np.full(size, value, dtype)

    return {
        "places": repeat(place, np.int64),
        "positions": repeat(0, np.int64),
        "context_lens": repeat(1, np.int32),
        "write_pages": repeat(page, np.int64),
        "write_offsets": repeat(0, np.int64),
        "answer_places": repeat(place + 1, np.int64),
        "answer_positions": repeat(1, np.int64),
        "temperature": repeat(0, np.float32),
        "top_k": repeat(0, np.int64),
        "top_p": repeat(1, np.float64),
        "min_p": repeat(0, np.float64),
        "seeds": repeat(0, np.uint64),
        "repetition": repeat(1, np.float32),
        "frequency": repeat(0, np.float32),
        "presence": repeat(0, np.float32),
        "counts_line": repeat(-1, np.int32),
        "mask_line": repeat(-1, np.int32),
        "bias_starts": np.zeros(size + 1, np.int32),
    }


class DecodeGraphs:
    """Owns a model's graphs, which share their rows."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        pages: Tensor,
        rows: Rows,
        padding_page: int,
        max_rows: int,
        capture: Capture,
        on_progress: OnCaptured,
    ) -> None:
        """Captures all, the largest first, so that the others fit into its memory."""
        rows.reserve_counts()
        self._sizes = choose_sizes(max_rows)
        graphs = []
        for size in reversed(self._sizes):
            graphs.append(DecodeGraph(size, model, attention, pages, rows, padding_page))
            graphs[-1].capture(capture)
            on_progress(len(graphs), len(self._sizes))
        self._graphs = graphs[::-1]

    def find(self, step: Prepared) -> DecodeGraph | None:
        """The smallest for the step. None if it is no plain step, or asks for more than graphs can do."""
        num_rows = len(step.layout.places)
        is_plain = len(step.layout.query_lens) == len(step.outputs.rows) == num_rows and len(step.pieces) == 1
        if not is_plain or num_rows > self._sizes[-1]:
            return None
        piece = step.pieces[0]
        num_biases = 0 if piece.sampling.bias_ids is None else len(piece.sampling.bias_ids)
        if piece.chosen is not None or piece.guesses is not None or num_biases > MAX_BIASES:
            return None
        return self._graphs[bisect_left(self._sizes, num_rows)]
