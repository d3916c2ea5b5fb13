"""Drafts by a head."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch, ForwardRow, Prepared
from engine.heads.decoder import HeadDecoder
from engine.heads.follower import HeadFollower
from engine.input_batch import InputBatch
from engine.models.decoder import Decoder
from engine.runner import Finish, Runner
from engine.staging import upload


class HeadRunner(Runner):
    """Drafts with a head: one token a request. The first one needs no forward, since the head has followed the model.

    The head has the token at position i, and its KV, at position i - 1.
    """

    is_head = True

    def __init__(
        self, model: HeadDecoder, attention: AttentionBackend, pages: Tensor, rows: InputBatch, target: Decoder
    ) -> None:
        """See `Runner`. target: the model whose steps it follows."""
        super().__init__(model, attention, pages, rows, drafts=True)
        self.as_follower = HeadFollower(model, target, attention, pages, rows)
        self.carried: Tensor = self.as_follower.known.clone()  # what the head gives after the last draft of each row

    def _prepare(self, requests: Sequence[ForwardRow]) -> Prepared:
        step = super()._prepare(requests)
        if not step.has_drafted:
            return step
        layout, positions = step.layout, step.layout.positions - 1
        slots = self.rows.slots(step.outputs.rows, positions)
        layout = layout._replace(positions=positions, seq_lens=layout.seq_lens - 1, slot_mapping=slots)
        return replace(step, layout=layout)

    def _begin(self, step: Prepared) -> Finish:
        return super()._begin(step) if step.has_drafted else self.begin_step(step)

    def _forward(self, step: Prepared, batch: Batch) -> Tensor:
        (row_ids,) = upload([step.outputs.rows], self.rows.device)
        if step.has_drafted:
            hidden = super()._forward(step, replace(batch, hidden=self.carried.index_select(0, row_ids)))
        else:
            hidden = self.as_follower.known.index_select(0, row_ids)
        self.carried.index_copy_(0, row_ids, hidden)
        return hidden
