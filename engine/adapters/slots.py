"""The slots for adapters (LoRA) that a model has on a device, and which rows of a step have which."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.linear import AdaptedGated, AdaptedLinear, AdaptersStep, Site, interleave_panels
from engine.adapters.ops import AdapterOps
from engine.adapters.rows import NO_SLOT, AdapterTiles, AdapterWeights, HostTiles, divide_columns, sort_rows
from engine.batch import Batch, Layout, StepFeature
from engine.input_batch import RowFeature
from engine.layers.linear import Additions, Gated, Linear, ProductKey
from engine.staging import Ints, upload


class SiteAdapter(NamedTuple):
    """One adapter's part of one product of P parts, on the host."""

    a: Tensor  # [P r, K]
    b: tuple[Tensor, ...]  # of each part, [N of the part, r]


class AdapterLimits(NamedTuple):
    """Limits of one model on one device."""

    num_slots: int  # adapters in steps at once
    max_rank: int


NO_ADAPTERS = AdapterLimits(0, 1)
HostAdapter = Mapping[ProductKey, SiteAdapter]


@dataclass(slots=True, eq=False)
class Adapters(Additions):
    """Owns the slots. One caller at a time, between steps."""

    num_slots: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
    ops: AdapterOps
    step: AdaptersStep = field(default_factory=AdaptersStep)
    sites: dict[ProductKey, Site] = field(default_factory=dict)
    hosted: dict[str, HostAdapter] = field(default_factory=dict)  # digest |-> adapter, those that slots can get

    def wrap(self, own: Linear, key: ProductKey, depth: int, part_sizes: Sequence[int]) -> Linear:
        return AdaptedLinear(own, self._add_site(key, depth, part_sizes))

    def wrap_gated(self, own: Gated, key: ProductKey, depth: int, part_sizes: Sequence[int]) -> Linear:
        return AdaptedGated(own, self._add_site(key, depth, part_sizes, own.panel_columns))

    def _add_site(self, key: ProductKey, depth: int, part_sizes: Sequence[int], panel_columns: int = 0) -> Site:
        """Allocate the slots of a product. part_sizes: columns of each part."""
        if panel_columns:
            part_sizes = [-(-size // panel_columns) * panel_columns for size in part_sizes]
            blocks = divide_columns(part_sizes, panel_columns, alternates=True)
        else:
            blocks = divide_columns(list(part_sizes))
        self.sites[key] = site = Site(
            AdapterWeights(
                self._zeros(len(part_sizes) * self.max_rank, depth), self._zeros(self.max_rank, sum(part_sizes)),
                self._zeros(dtype=torch.int32), torch.from_numpy(blocks).to(self.device),
            ),
            self.step, self.ops, panel_columns,
        )  # fmt: skip
        return site

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(self.num_slots, *shape, dtype=dtype or self.dtype, device=self.device)

    def fill(self, slot: int, digest: str) -> None:
        """Put an adapter into a slot that no sequence has, after everything launched before. KeyError if unknown."""
        adapter = self.hosted[digest]
        for key, site in self.sites.items():
            a, b, ranks, _blocks = site.weights
            own = adapter.get(key)
            if own is None:
                ranks[slot] = 0
                continue
            num_parts, rank = len(own.b), own.b[0].shape[1]
            width = site.panel_columns
            columns = interleave_panels(own.b, width) if width else torch.cat(own.b)  # [N, r]
            for part, given in zip(a[slot].view(num_parts, self.max_rank, -1), own.a.chunk(num_parts), strict=True):
                part[:rank], part[rank:] = given, 0
            b[slot, :rank], b[slot, rank:] = columns.T, 0
            ranks[slot] = rank

    def forget(self, digest: str) -> None:
        """No slot gets it any more; slots that have it keep it. Idempotent."""
        self.hosted.pop(digest, None)

    @contextmanager
    def during(self, batch: Batch) -> Iterator[None]:
        if batch.additions is None:
            yield
            return
        tiles, outputs = batch.additions
        if self.device.type == "cpu":  # whose kernel reads what the tiles say
            for own, num_rows in ((tiles, len(batch.positions)), (outputs, len(batch.logits_rows))):
                HostTiles(own.rows.numpy(), own.tiles.numpy()).check(num_rows, self.num_slots)
        self.step.tiles, self.step.outputs = tiles, outputs
        try:
            yield
        finally:
            self.step.tiles = self.step.outputs = None

    def keep_outputs(self) -> None:
        """From here on products get the rows with logits alone."""
        self.step.tiles = self.step.outputs


@dataclass(frozen=True, slots=True)
class StepTiles(StepFeature):
    """Which rows of a step have which adapter."""

    tokens: HostTiles
    outputs: HostTiles  # the same of the rows with logits

    def add_to(self, batch: Batch) -> Batch:
        """`Batch.additions`: (tiles of the tokens, tiles of the rows with logits)."""
        rows, tiles, output_rows, output_tiles = upload([*self.tokens, *self.outputs], batch.places.device)
        return replace(batch, additions=(AdapterTiles(rows, tiles), AdapterTiles(output_rows, output_tiles)))


class AdapterRows(RowFeature):
    """Which slot the sequence of each row has."""

    def __init__(self, adapters: Adapters, num_rows: int) -> None:
        self._adapters = adapters
        self._slots = np.full(num_rows, NO_SLOT, np.int32)
        self._num_rows = 0  # that have one

    def open(self, row: int, token_ids: NDArray[np.int32], wanted: int) -> None:
        self._slots[row], self._num_rows = wanted, self._num_rows + 1

    def close(self, row: int) -> None:
        if self._slots[row] != NO_SLOT:
            self._slots[row], self._num_rows = NO_SLOT, self._num_rows - 1

    def lay_out(self, rows: Ints, layout: Layout) -> StepTiles | None:
        if not self._num_rows or not np.count_nonzero(self._slots[rows] != NO_SLOT):
            return None
        slots = np.repeat(self._slots[rows], layout.query_lens)  # [T]
        return StepTiles(sort_rows(slots), sort_rows(slots[layout.logits_rows]))

    def fill(self, slot: int, key: str) -> None:
        self._adapters.fill(slot, key)

    def forget(self, key: str) -> None:
        self._adapters.forget(key)
