"""Drafts by a head."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch, ForwardRow, Prepared
from engine.heads.decoder import DraftDecoder, HeadDecoder
from engine.heads.follower import HeadFollower, RowFollower
from engine.input_batch import InputBatch
from engine.models.decoder import Decoder
from engine.runner import Finish, Runner
from engine.staging import upload


class HeadRunner(Runner):
    """Drafts with a head: one token a request, of equally many before it in all. The first one needs no forward, since
    the head has followed the model.

    The head has the token at position i, and its KV, at position i - 1.
    """

    is_head = True

    def __init__(
        self, model: DraftDecoder, attention: AttentionBackend, pages: Tensor, rows: InputBatch, target: Decoder
    ) -> None:
        """See `Runner`. target: the model whose steps it follows."""
        super().__init__(model, attention, pages, rows, drafts=True)
        self.as_follower = (
            HeadFollower(model, target, attention, pages, rows)
            if isinstance(model, HeadDecoder)
            else RowFollower(model, target, rows)
        )
        self.most_drafts, self._go_to = model.most_drafts, model.go_to
        self.carried: Tensor = self.as_follower.known.clone()  # what the head gives after the last draft of each row

    def _prepare(self, requests: Sequence[ForwardRow]) -> Prepared:
        step = super()._prepare(requests)
        if not step.num_drafted:
            return step
        layout, positions = step.layout, step.layout.positions - 1
        slots = self.rows.slots(step.outputs.rows, positions)
        layout = layout._replace(positions=positions, seq_lens=layout.seq_lens - 1, slot_mapping=slots)
        return replace(step, layout=layout)

    def _begin(self, step: Prepared) -> Finish:
        return super()._begin(step) if step.num_drafted else self.begin_step(step)

    def _forward(self, step: Prepared, batch: Batch) -> Tensor:
        self._go_to(step.num_drafted)
        (row_ids,) = upload([step.outputs.rows], self.rows.device)
        if step.num_drafted:
            hidden = super()._forward(step, replace(batch, hidden=self.carried.index_select(0, row_ids)))
        else:
            hidden = self.as_follower.known.index_select(0, row_ids)
        self.carried.index_copy_(0, row_ids, hidden)
        return hidden
