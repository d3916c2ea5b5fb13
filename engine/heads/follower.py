"""Runs a draft head behind its model's steps: it takes each step's hidden rows, and the tokens that follow them."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch, Prepared
from engine.heads.decoder import DraftDecoder, HeadDecoder
from engine.input_batch import InputBatch
from engine.models.decoder import Decoder
from engine.out_of_memory import is_out_of_memory
from engine.runner import Follower
from engine.staging import Ints, upload

log = structlog.get_logger()


class DraftSpec(NamedTuple):
    """The J sequences of a step that have drafts. The head has to know which are right."""

    rows: Ints  # [J]
    num_drafts: Ints  # [J]
    inputs: Ints  # [J, K] the drafts among the step's T tokens, aligned right
    outputs: Ints  # [J, K] what the model chose in their place, among the S outputs


class RowFollower(Follower):
    """Owns nothing but `known`: [rows + 1, H] what drafts go on from after the last token of each row. This one keeps
    the model's own hidden rows of those tokens."""

    def __init__(self, model: DraftDecoder, target: Decoder, rows: InputBatch, known: Tensor | None = None) -> None:
        """target: the model. known: of another follower over the same rows."""
        sizes = rows.num_rows + 1, model.config.hidden_size
        self.known = torch.zeros(sizes, dtype=model.dtype, device=rows.device) if known is None else known
        self._target, self._rows = target, rows

    def add_taps(self, batch: Batch) -> Batch:
        return replace(batch, taps=self._target.new_taps(len(batch.places))) if self._target.taps else batch

    def follow(self, batch: Batch, step: Prepared, hidden: Tensor, tokens: Tensor) -> None:
        lasts, device = find_lasts(step.outputs.rows), self._rows.device
        of_rows = step.outputs.rows[lasts]
        rights, row_ids = upload([lasts, of_rows], device)
        if (drafts := plan_drafts(step)) is not None:
            of_drafts, *others = drafts
            which, num_drafts, inputs, outputs = upload([np.flatnonzero(np.isin(of_rows, of_drafts)), *others], device)
            num_wrong = num_drafts - count_right(batch.token_ids[inputs], tokens[outputs], num_drafts)
            rights = rights.index_add(0, which, num_wrong, alpha=-1)
        for feature in step.layout.features:
            rights = feature.find_lasts(rights)
        self.run(batch, hidden, rights, row_ids)

    def find_lasts(self, read_tokens: Callable[[], Tensor], chosen: Tensor, num_drafts: Tensor) -> Tensor:
        num_sequences, num_tokens = chosen.shape
        ends = torch.arange(1, num_sequences + 1, device=chosen.device) * num_tokens - 1
        if num_tokens == 1:
            return ends
        return ends - (num_drafts - count_right(read_tokens()[:, 1:], chosen[:, :-1], num_drafts))

    def run(self, batch: Batch, hidden: Tensor, lasts: Tensor, row_ids: Tensor) -> None:
        if batch.taps is not None:
            hidden = batch.taps.index_select(0, batch.logits_rows)
        self.known.index_copy_(0, row_ids, hidden.index_select(0, lasts))


class HeadFollower(RowFollower):
    """Runs a draft head over the positions of each step, and keeps its rows."""

    def __init__(
        self, model: HeadDecoder, target: Decoder, attention: AttentionBackend, pages: Tensor, rows: InputBatch,
        known: Tensor | None = None,
    ) -> None:  # fmt: skip
        """pages: the head's part of a pool."""
        super().__init__(model, target, rows, known)
        self._model, self._attention, self._pages = model, attention, pages

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "HeadFollower":
        attention = self._attention.for_graph(num_sequences, num_tokens, num_pages)
        return HeadFollower(self._model, self._target, attention, self._pages, self._rows, self.known)

    def plan(self, batch: Batch) -> None:
        self._attention.plan(self._pages, replace(batch, embedded=None))

    def follow(self, batch: Batch, step: Prepared, hidden: Tensor, tokens: Tensor) -> None:
        """Drafts are worse if the head cannot; ranks would differ then."""
        try:
            chains = batch
            for feature in step.layout.features:
                chains = feature.as_chains(chains)
            if chains is not batch:
                self.plan(chains)
            super().follow(chains, step, hidden, tokens)
        except Exception as error:
            if self._model.ranks.size > 1 or not is_out_of_memory(error):
                raise
            log.warning("the draft head could not follow a step", reason=str(error))

    def run(self, batch: Batch, hidden: Tensor, lasts: Tensor, row_ids: Tensor) -> None:
        assert batch.taps is not None
        logits_rows = batch.logits_rows.index_select(0, lasts)
        token_ids = self._rows.flat_tokens.index_select(0, batch.places + 1).long()
        own = replace(
            batch, token_ids=token_ids, hidden=self._model.fuse(batch.taps), taps=None, logits_rows=logits_rows,
            additions=None, states=None, rope_positions=None, embedded=None,
        )  # fmt: skip
        given = self._model.run_planned(own, self._attention)
        if len(row_ids):
            self.known.index_copy_(0, row_ids, given)


def find_lasts(rows: Ints) -> Ints:
    """[S] rows of a step's outputs |-> each row's last output."""
    return np.flatnonzero(np.append(rows[1:] != rows[:-1], True)) if len(rows) else rows


def plan_drafts(step: Prepared) -> DraftSpec | None:
    """None if no request has drafts."""
    which = step.num_drafts.nonzero()[0]
    if not len(which):
        return None
    back = np.arange(-int(step.num_drafts.max()), 0)
    ends = step.num_logits.cumsum()[which] - 1  # the output after the last draft
    return DraftSpec(
        step.outputs.rows[ends],
        step.num_drafts[which],
        np.maximum(step.layout.cu_seqlens_q[1:][which, None] + back, 0),
        np.maximum(ends[:, None] + back, 0),
    )


def count_right(drafts: Tensor, chosen: Tensor, num_drafts: Tensor) -> Tensor:
    """How many of each sequence's drafts are accepted: those before the first that was not chosen. Only launches.

    drafts, chosen: [J, K], aligned right; chosen[j, i] is what the model chose in place of drafts[j, i].
    num_drafts: [J].
    """
    width = drafts.shape[1]
    is_none = torch.arange(width, device=drafts.device) < (width - num_drafts)[:, None]
    return (is_none | (drafts == chosen)).long().cumprod(1).sum(1) - (width - num_drafts)
