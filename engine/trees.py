"""Trees of drafts: several guesses for one place of an answer, which one step verifies.

    index of a new token   0 ─┬─ 1 ─── 2       the drafts' parents: (0, 1, 0); siblings have different tokens
                              └─ 3
    place of its KV and of its token           begin + index
    position, for rotation and noise           begin + depth

A token sees all before the row's new tokens, and of these its ancestors and itself. A token is a function of what it
sees, its parameters and its position: a draft is right where its parent is, and the parent's row chose it. What is
right then moves to where a chain has it (`DraftTree.keep`), before anything else is launched.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, Layout, StepFeature
from engine.staging import Ints, upload
from wire.kv_layout import TOKENS

Parents = tuple[int, ...]


def lay_out(layout: Layout, parents: Sequence[Parents | None]) -> Layout:
    """The layout of chains as one of trees. parents: of each request; None: a chain. ValueError: one does not fit."""
    tree = DraftTree(layout, {which: own for which, own in enumerate(parents) if own})
    positions = layout.positions.copy()
    positions[tree.tokens] = positions[tree.tokens[:, :1]] + tree.depths
    return layout._replace(positions=positions, features=(tree,))


class DraftTree(StepFeature):
    """Trees of J requests of a step, of up to N new tokens. Where one has fewer, its first stands for the others."""

    def __init__(self, layout: Layout, parents: dict[int, Parents]) -> None:
        which, starts = np.array([*parents]), layout.cu_seqlens_q.astype(np.int64)
        counts = np.array([1 + len(own) for own in parents.values()])
        num_logits = np.diff(np.searchsorted(layout.logits_rows, starts))
        if (num_logits[which] != counts).any() or (layout.query_lens[which] != counts).any():
            raise ValueError(f"trees of {counts} tokens, of which {num_logits[which]} have logits")
        sizes = len(which), int(counts.max())
        index = np.where(np.arange(sizes[1]) < counts[:, None], np.arange(sizes[1]), 0)
        self.tokens = starts[which, None] + index  # [J, N] among T
        self.depths = np.zeros(sizes, np.int64)
        self._outputs = (num_logits.cumsum()[which] - counts)[:, None] + index  # [J, N] among S
        self._rows = (num_logits > 0).cumsum()[which] - 1  # [J] among rows with outputs
        self._parents, self._sees = np.zeros(sizes, np.int64), np.zeros((*sizes, sizes[1]), np.bool_)
        self._is_padding = np.arange(sizes[1]) >= counts[:, None]
        self._places, self._slots = layout.places[self.tokens], layout.slot_mapping[self.tokens]
        self._lasts: Tensor | None = None  # [J] among S
        self._sources: Tensor | None = None  # [J, N], which of the new tokens each place gets
        self.detours: Ints = np.zeros((len(layout.logits_rows), int(num_logits.max())), np.int64)
        for at, own in enumerate(parents.values()):
            self._add(at, own)

    @property
    def is_capturable(self) -> bool:
        return False

    def _add(self, at: int, parents: Parents) -> None:
        self._sees[at, 0, 0] = True
        for index, parent in enumerate(parents, 1):
            if not 0 <= parent < index:
                raise ValueError(f"a tree with parents {parents}")
            self._parents[at, index], self.depths[at, index] = parent, self.depths[at, parent] + 1
            self._sees[at, index] = self._sees[at, parent]
            self._sees[at, index, index] = True
            path = self._sees[at, index].nonzero()[0]
            self.detours[self._outputs[at, index], : len(path) - 1] = path[1:] - np.arange(1, len(path))

    def add_to(self, batch: Batch) -> Batch:
        bits = np.zeros(len(batch.token_ids), np.int32)
        bits[self.tokens] = np.where(self._is_padding, 1, self._sees @ (1 << np.arange(self._sees.shape[2])))
        (ancestors,) = upload([bits], batch.token_ids.device)
        return replace(batch, ancestors=ancestors)

    def keep(self, batch: Batch, tokens: Tensor, pages: Tensor, flat_tokens: Tensor) -> None:
        width = self.depths.shape[1]
        on_host = self.tokens, self._outputs, self._parents, self._sees, self._is_padding, self.depths
        nodes, outputs, parents, sees, is_padding, depths = upload([*on_host], tokens.device)
        places, slots = upload([self._places, self._slots], tokens.device)
        chosen, own = tokens[outputs], torch.arange(width, device=tokens.device).expand(len(nodes), width)
        is_right = batch.token_ids[nodes] == chosen.gather(1, parents)
        is_right[:, 0] = True
        is_kept = (is_right[:, None] | ~sees).all(2) & ~is_padding  # one a depth, up to the last right one
        sources = torch.cat((own, own[:, :1]), 1)  # [J, N + 1], what each place gets: itself, where nothing is right
        sources = sources.scatter(1, torch.where(is_kept, depths, width), own)[:, :width]
        self._sources = sources
        lasts = sources.gather(1, (depths * is_kept).amax(1, keepdim=True))
        self._lasts = outputs.gather(1, lasts)[:, 0]
        kept = chosen.gather(1, sources).clamp(min=0).to(torch.int32)
        flat_tokens.index_copy_(0, (places + 1).view(-1), kept.view(-1))
        self._move(pages, slots.gather(1, sources).view(-1), slots.view(-1))

    def as_chains(self, batch: Batch) -> Batch:
        assert self._sources is not None and batch.taps is not None
        nodes, outputs, depths = upload([self.tokens, self._outputs, self.depths], batch.taps.device)
        order = torch.arange(len(batch.token_ids), device=nodes.device)
        order[nodes] = nodes.gather(1, self._sources)
        positions, logits_rows = batch.positions.clone(), batch.logits_rows.clone()
        positions[nodes] = positions[nodes[:, :1]] + nodes - nodes[:, :1]
        logits_rows[outputs] = nodes[:, :1] + depths
        taps = batch.taps.index_select(0, order)
        return replace(batch, positions=positions, logits_rows=logits_rows, taps=taps, ancestors=None)

    def _move(self, pages: Tensor, sources: Tensor, targets: Tensor) -> None:
        if not pages.is_cuda:  # which ones is known
            is_moved = sources != targets
            sources, targets = sources[is_moved], targets[is_moved]
        if pages.element_size() == 1:
            pages = pages.view(torch.uint8)
        size = pages.shape[TOKENS]
        pages[targets // size, :, :, :, targets % size] = pages[sources // size, :, :, :, sources % size]

    def find_lasts(self, lasts: Tensor) -> Tensor:
        assert self._lasts is not None
        (rows,) = upload([self._rows], lasts.device)
        return lasts.index_copy(0, rows, self._lasts)
