"""The input of one forward pass.

A batch is ragged: the new tokens of all its sequences lie one after the other. Knows ids, positions and pages, nothing
of requests, sampling or time. The host lays it out without knowing the tokens; the device gathers them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.rows import AdapterTiles, HostTiles, sort_rows
from engine.input_batch import InputBatch
from engine.ranges import Ints, find_starts, join_ranges
from engine.staging import Stager, upload
from engine.vision.image_rows import BatchImages, StepImages, find_images, find_turns, gather


class ForwardRow(NamedTuple):
    """One row's request of a step: positions [begin, begin + count) of its sequence, drafts included.

    A sequence may have two, if its state between them is wanted: all first ones come before all second ones.

    The row's pages already hold the KV of [0, begin); the step writes the rest. Each row of logits predicts
    the token after its position.
    """

    row: int
    begin: int
    count: int  # type: ignore[assignment]  # hides the method of tuples
    num_logits: int = 0  # logits of this many last positions are wanted; 0: none, 1: a plain step
    num_given: int = 0  # the first of those are followed by known tokens: scored, not sampled
    given_logprobs: int = 0  # top logprobs to return for those
    chosen_logprobs: int | None = None  # the same for sampled ones; None: no log-probabilities
    mask: NDArray[np.int32] | None = None  # [num_logits - num_given, ceil(V / 32)] tokens that may be chosen; None: all
    num_drafted: int = 0  # the last tokens up to the first sampled one that are drafts too: seen, never counted
    num_unjudged: int = 0
    """Drafts of the row's last step if the host does not know yet which were right: `begin` counts all, and the device
    subtracts the wrong ones (InputBatch.lag)."""
    state_from: int = -1  # slot with the state after the positions before `begin`; -1: the sequence begins, or has none
    state_to: int = -1  # slot for the state after the step. Only the row's second request may read it in the same step,
    # or write to the slot that its first one reads

    @property
    def num_drafts(self) -> int:
        """Tokens after the first sampled one's row that this step checks."""
        return max(self.num_logits - self.num_given - 1, 0)


UNJUDGED, STATE_FROM = (ForwardRow._fields.index(name) for name in ("num_unjudged", "state_from"))
NO_SLOTS: Ints = np.zeros((2, 0), np.int64)


class Layout(NamedTuple):
    """T new tokens of B sequences, on the host. All but the last six are uploaded, in this order.

    Where drafts are unjudged, positions and lengths are the most that they can be.
    """

    places: Ints  # [T] of the new tokens in the flat InputBatch.tokens
    positions: Ints  # [T]
    cu_seqlens_q: NDArray[np.int32]  # [B + 1]
    seq_lens: NDArray[np.int32]  # [B]
    page_table: NDArray[np.int32]  # [B, P]
    slot_mapping: Ints  # [T]
    logits_rows: Ints  # [S]
    slots: Ints  # [2, B] state_from and state_to of each sequence; [2, 0] if the model has no states
    query_lens: NDArray[np.int32]  # [B]
    split: int | None  # see `States`
    lag_rows: Ints | None  # [B] rows whose lag counts, the row after all others where none does; None: nowhere
    adapters: tuple[HostTiles, HostTiles] | None  # of the tokens, and of the rows with logits; None: no row has one
    turns: Ints | None = None  # [T], or [3, T] with tokens of images: turns heads in place of the positions (M-RoPE)
    images: StepImages | None = None

    @property
    def owners(self) -> Ints:
        """[T] the sequence of each token."""
        return np.repeat(np.arange(len(self.query_lens)), self.query_lens)


def take_turns(row: int, step: int) -> tuple[int, int]:
    """state_from and state_to of the `step`-th request of a row with two slots, 2 row and 2 row + 1, of its own."""
    return (2 * row + (step + 1) % 2 if step else -1), 2 * row + step % 2


class States(NamedTuple):
    """What layers without attention keep of each sequence, in slots of a pool.

    A step reads one slot and writes another, so one that failed, or was taken back, can be launched again.
    """

    parts: tuple[Tensor, ...]  # of each of the model's StateParts: [num_slots, heads, layers, ...] float32
    sources: Tensor  # [B] int64, slots with the states before the step; -1: the sequence begins, its state is zeros
    targets: Tensor  # [B] int64, slots for the states after it
    split: int | None = None  # sequences from here on begin with states that earlier ones leave in this step


@dataclass(frozen=True, slots=True)
class Batch:
    """T new tokens of B sequences. Built by `build_batch`; immutable."""

    token_ids: Tensor  # [T] int64
    places: Tensor  # [T] int64, where they are in the flat InputBatch.tokens
    positions: Tensor  # [T] int64
    cu_seqlens_q: Tensor  # [B + 1] int32, row of each sequence's first new token; ends with T
    seq_lens: Tensor  # [B] int32, tokens in KV after this step, the new ones included
    page_table: Tensor  # page ids; after a sequence's context any valid id
    slot_mapping: Tensor  # [T] int64, where the KV of each new token goes: page * page_tokens + its row in the page
    logits_rows: Tensor  # [S] int64, rows of T whose logits are wanted, ascending: each request's last num_logits
    query_lens_host: NDArray[np.int32]  # [B], the same on the host
    seq_lens_host: NDArray[np.int32]  # [B], the same on the host
    is_lagging: bool = False  # some sequences may begin earlier: see `shift`
    states: States | None = None  # if the model has some
    adapters: tuple[AdapterTiles, AdapterTiles] | None = None  # of the tokens, and of the rows with logits
    turns: Tensor | None = None  # see `Layout`
    images: BatchImages | None = None
    taps: Tensor | None = None  # [T, N H] to be written for a draft head: see `Decoder.tap`
    hidden: Tensor | None = None  # [T, H] of a draft head's step: rows that go with the tokens


def lay_out(rows: InputBatch, requests: Sequence[ForwardRow]) -> Layout:
    """Where the requests' tokens and pages are. ValueError if a request ends beyond its row."""
    columns = list(zip(*requests, strict=True))
    row, begins, counts, num_logits = (np.array(values, np.int64) for values in columns[:4])
    ends = begins + counts
    longest = max(ends.tolist())
    check_ends(rows, longest)
    owners, positions = join_ranges(begins, counts)
    token_rows = row[owners]
    starts, num_sequences = find_starts(counts), len(set(columns[0]))
    turns = images = None
    if rows.images and rows.image_rules is not None:
        turns = find_turns(rows.images, columns[0], owners, positions)
        images = find_images(rows.images, rows.image_rules, columns[0], begins, counts)
    logits_rows = join_ranges(starts[1:] - num_logits, num_logits)[1]
    return Layout(
        places=token_rows * rows.width + positions,
        positions=positions,
        cu_seqlens_q=starts,
        seq_lens=ends.astype(np.int32),
        page_table=rows.page_table[row, : -(-longest // rows.page_tokens)],
        slot_mapping=rows.slots(token_rows, positions),
        logits_rows=logits_rows,
        slots=find_slots(rows, columns[STATE_FROM:]),
        query_lens=counts.astype(np.int32),
        split=num_sequences if num_sequences < len(row) else None,
        lag_rows=np.where(columns[UNJUDGED], row, rows.num_rows) if any(columns[UNJUDGED]) else None,
        adapters=find_adapters(rows.adapter_slots[row][owners], logits_rows) if rows.num_adapted else None,
        turns=turns,
        images=images,
    )


def find_adapters(slots: NDArray[np.int32], logits_rows: Ints) -> tuple[HostTiles, HostTiles] | None:
    """slots: [T] of the tokens |-> `Layout.adapters`."""
    if not np.count_nonzero(slots >= 0):
        return None
    return sort_rows(slots), sort_rows(slots[logits_rows])


def find_slots(rows: InputBatch, slots: Sequence[Sequence[int]]) -> Ints:
    """state_from and state_to of the requests |-> `Layout.slots`. ValueError for slots that do not exist: a bug."""
    if not rows.states:
        return NO_SLOTS
    found = np.array(slots, np.int64)  # [2, B]
    sources, targets = found
    if sources.min() < -1 or targets.min() < 0 or found.max() >= len(rows.states[0]):
        raise ValueError(f"slots {found.tolist()} of {len(rows.states[0])}")
    return found


def check_ends(rows: InputBatch, longest: int) -> None:
    """ValueError if no request can end at `longest`."""
    if longest >= rows.width:
        raise ValueError(f"{longest} positions and a token after them, in a row of {rows.width}")


def build_batch(layout: Layout, rows: InputBatch, stager: Stager) -> Batch:
    """The batch on the device of `rows`. The device reads the tokens from the rows when it gets here.

    Arrays that are the same objects as in the stager's last layout keep their tensors. See `shift` for a layout with
    `lag_rows`.
    """
    places, *fields = stager.upload(layout[:-6])
    positions, cu_seqlens_q, seq_lens, page_table, slot_mapping, logits_rows, slots = fields
    return Batch(
        rows.tokens.take(places).long(), places, positions, cu_seqlens_q, seq_lens, page_table, slot_mapping,
        logits_rows,
        query_lens_host=layout.query_lens, seq_lens_host=layout.seq_lens, is_lagging=layout.lag_rows is not None,
        states=States(rows.states, slots[0], slots[1], layout.split) if rows.states else None,
        adapters=None if layout.adapters is None else upload_tiles(*layout.adapters, rows.device),
        turns=None if layout.turns is None else upload([layout.turns], rows.device)[0],
        images=None if layout.images is None else gather(layout.images, rows.device),
    )  # fmt: skip


def upload_tiles(tokens: HostTiles, outputs: HostTiles, device: torch.device) -> tuple[AdapterTiles, AdapterTiles]:
    """`Layout.adapters` |-> `Batch.adapters`."""
    token_rows, token_tiles, output_rows, output_tiles = upload([*tokens, *outputs], device)
    return AdapterTiles(token_rows, token_tiles), AdapterTiles(output_rows, output_tiles)


def shift(batch: Batch, lag: Tensor, owners: Tensor, rows: InputBatch, padding_slot: int) -> Batch:
    """The batch with sequence b begun lag[b] positions earlier. Only launches.

    lag: [B]; owners: [T] sequence of each token. Slots from `padding_slot` on stay.
    """
    of_tokens = lag.index_select(0, owners)  # [T]
    places, positions = batch.places - of_tokens, batch.positions - of_tokens
    pages = batch.page_table.view(-1).index_select(
        0, owners * batch.page_table.shape[1] + positions // rows.page_tokens
    )
    slots = pages.long() * rows.page_tokens + positions % rows.page_tokens
    return replace(
        batch,
        token_ids=rows.flat_tokens.index_select(0, places).long(),
        places=places,
        positions=positions,
        turns=None if batch.turns is None else batch.turns - of_tokens,
        seq_lens=batch.seq_lens - lag.to(torch.int32),
        slot_mapping=torch.where(batch.slot_mapping < padding_slot, slots, batch.slot_mapping),
    )


def select(batch: Batch, which: Sequence[int]) -> tuple[Batch, Tensor, Tensor]:
    """The step of some of the batch's sequences alone; which of the T rows, and of the S rows of logits, are theirs.

    Waits for the device.
    """
    chosen, all_counts = np.array(which, np.int64), batch.query_lens_host.astype(np.int64)
    counts = all_counts[chosen]
    rows = join_ranges(find_starts(all_counts)[chosen].astype(np.int64), counts)[1]  # [t]
    logits_rows = batch.logits_rows.cpu().numpy()
    outputs = np.flatnonzero(np.isin(logits_rows, rows))  # [s]
    own_outputs = np.searchsorted(rows, logits_rows[outputs])
    fields: list[NDArray[Any]] = [chosen, rows, outputs, find_starts(counts), own_outputs]
    sequences, tokens, outputs_here, cu_seqlens_q, own_rows = upload(fields, batch.token_ids.device)
    states = batch.states
    part = Batch(
        batch.token_ids[tokens], batch.places[tokens], batch.positions[tokens], cu_seqlens_q, batch.seq_lens[sequences],
        batch.page_table[sequences], batch.slot_mapping[tokens], own_rows, batch.query_lens_host[chosen],
        batch.seq_lens_host[chosen],
        states=states and states._replace(sources=states.sources[sequences], targets=states.targets[sequences]),
    )  # fmt: skip
    return part, tokens, outputs_here


def count_right(drafts: Tensor, chosen: Tensor, num_drafts: Tensor) -> Tensor:
    """How many of each sequence's drafts are accepted: those before the first that was not chosen. Only launches.

    drafts, chosen: [J, K], aligned right; chosen[j, i] is what the model chose in place of drafts[j, i].
    num_drafts: [J].

    A token is a function of its logits, parameters, seed and position (`engine.sampling`), so plain decoding gives one
    answer. What the model chooses after right drafts is that answer's next token; after a wrong one it has seen a wrong
    text. So the step gives the right drafts and one token more, whatever the drafter proposes.
    """
    width = drafts.shape[1]
    is_none = torch.arange(width, device=drafts.device) < (width - num_drafts)[:, None]
    return (is_none | (drafts == chosen)).long().cumprod(1).sum(1) - (width - num_drafts)
