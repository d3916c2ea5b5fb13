"""Drafts by a head."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch, ForwardRow, Prepared
from engine.cuda.graph_shapes import Shape
from engine.cuda.graphs import Capture, DecodeGraph, DecodeGraphs, OnCaptured
from engine.heads.decoder import HeadDecoder
from engine.heads.follower import HeadFollower
from engine.input_batch import InputBatch
from engine.runner import Runner
from engine.staging import upload


class HeadRunner(Runner):
    """Drafts with a head: one token a request. The first one needs no forward, since the head has followed the model.

    The head has the token at position i, and its KV, at position i - 1.
    """

    is_head = True

    def __init__(self, model: HeadDecoder, attention: AttentionBackend, pages: Tensor, rows: InputBatch) -> None:
        """See `Runner`."""
        super().__init__(model, attention, pages, rows, drafts=True)
        self.follower = HeadFollower(model, attention, pages, rows)
        self._guessed = self.follower.known.clone()  # what the head gives after the last draft of each row

    def capture_graphs(
        self, shapes: Collection[Shape], capture: Capture, padding_page: int,
        on_progress: OnCaptured = lambda done, total: None,
    ) -> None:  # fmt: skip
        self._graphs = DecodeGraphs(
            self.choose_shapes(shapes), self._model, self._attention, self._pages, self._rows, padding_page, capture,
            on_progress, carried=self._guessed,
        )  # fmt: skip

    def choose_shapes(self, shapes: Collection[Shape]) -> Collection[Shape]:
        return [shape for shape in shapes if shape.num_tokens == 1]

    @property
    def has_pieces(self) -> bool:
        """Its steps with prompts follow the model's."""
        return False

    def warm_up(self, padding_page: int) -> None:
        """The model's, which this follows, does it."""

    def _prepare(self, requests: Sequence[ForwardRow]) -> Prepared:
        step = super()._prepare(requests)
        if not step.has_drafted:
            return step
        layout, positions = step.layout, step.layout.positions - 1
        slots = self._rows.slots(step.outputs.rows, positions)
        layout = layout._replace(positions=positions, seq_lens=layout.seq_lens - 1, slot_mapping=slots)
        return replace(step, layout=layout)

    def _find_graph(self, step: Prepared) -> DecodeGraph | None:
        return super()._find_graph(step) if step.has_drafted else None

    def _forward(self, step: Prepared, batch: Batch) -> Tensor:
        (row_ids,) = upload([step.outputs.rows], self._rows.device)
        if step.has_drafted:
            hidden = super()._forward(step, replace(batch, hidden=self._guessed.index_select(0, row_ids)))
        else:
            hidden = self.follower.known.index_select(0, row_ids)
        self._guessed.index_copy_(0, row_ids, hidden)
        return hidden
