"""The values of one step, from what is asked for to what the model gets. engine/prepared.py makes each from the last.

    ForwardRow, one a sequence |-> Prepared, on the host |-> Batch, on the device

A batch is ragged: the new tokens of all its sequences lie one after the other. The host lays it out without knowing
the tokens; the device gathers them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.batch import SamplingBatch
from engine.staging import Ints


class ForwardRow(NamedTuple):
    """One row's request of a step: positions [begin, begin + count) of its sequence, drafts included.

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
    state_from: int = -1  # slot with the state after the positions before `begin`; -1: the sequence begins, or has none
    state_to: int = -1  # another slot, for the state after the step
    parents: tuple[int, ...] | None = None  # of drafts, as in engine/trees.py; None: each follows the last


NO_SLOTS: Ints = np.zeros((2, 0), np.int64)


class StepFeature:
    """The part of a step that a feature of rows adds, on the host: see `RowFeature`."""

    rope_positions: Ints | None = None  # [T], or [3, T] by time, row and column; None: the positions
    detours: Ints | None = None  # see `SampleSpec`; the first feature's alone

    @property
    def is_capturable(self) -> bool:
        """Whether the step can be a graph."""
        return True

    def add_to(self, batch: "Batch") -> "Batch":
        """The batch with it. Launches only. ValueError says what is wrong with it."""
        return batch

    def keep(self, batch: "Batch", tokens: Tensor, pages: Tensor, flat_tokens: Tensor) -> None:
        """The step chose `tokens`, [S]: put what it leaves in pages and tokens where it belongs. Only launches."""

    def as_chains(self, batch: "Batch") -> "Batch":
        """The batch with the rows of what is right where a chain has them. After `keep`."""
        return batch

    def find_lasts(self, lasts: Tensor) -> Tensor:
        """[R] last outputs of the step's rows |-> those after the last right drafts. After `keep`."""
        return lasts


class Layout(NamedTuple):
    """T new tokens of B sequences, on the host. All but the last two are uploaded, in this order."""

    places: Ints  # [T] of the new tokens in the flat InputBatch.tokens
    positions: Ints  # [T]
    cu_seqlens_q: NDArray[np.int32]  # [B + 1]
    seq_lens: NDArray[np.int32]  # [B]
    page_table: NDArray[np.int32]  # [B, P]
    slot_mapping: Ints  # [T]
    logits_rows: Ints  # [S]
    slots: Ints  # [2, B] state_from and state_to of each sequence; [2, 0] if the model has no states
    query_lens: NDArray[np.int32]  # [B]
    features: tuple[StepFeature, ...] = ()

    @property
    def rope_positions(self) -> Ints:
        """[T], or [3, T]: what heads are rotated by (M-RoPE counts rows and columns of images)."""
        return next((one.rope_positions for one in self.features if one.rope_positions is not None), self.positions)


def take_turns(row: int, step: int) -> tuple[int, int]:
    """state_from and state_to of the `step`-th request of a row with two slots, 2 row and 2 row + 1, of its own."""
    return (2 * row + (step + 1) % 2 if step else -1), 2 * row + step % 2


class States(NamedTuple):
    """The memory of layers without attention, of each sequence, in slots of a pool.

    A step reads one slot and writes another, so one that failed, or was taken back, can be launched again.
    """

    parts: tuple[Tensor, ...]  # of each of the model's StateParts: [num_slots, heads, layers, ...] float32
    sources: Tensor  # [B] int64, slots with the states before the step; -1: the sequence begins, its state is zeros
    targets: Tensor  # [B] int64, slots for the states after it


class EmbeddedRows(NamedTuple):
    """n of a step's T tokens whose rows are given, not embedded: those of images."""

    at: Tensor  # [n] int64, which of the T
    rows: Tensor  # [n, H]
    deep: Tensor | None  # [L, n, H] to be added after each of the first L layers; None: nothing is
    visible_until: Tensor | None  # [T] int64: a token sees positions below this, too; None: only those before it
    in_all_layers: bool  # also in layers without a window


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
    states: States | None = None  # if the model has some
    additions: Any = None  # see `layers.additions`; None: nothing is added
    rope_positions: Tensor | None = None  # see `Layout`; None: the positions
    embedded: EmbeddedRows | None = None
    taps: Tensor | None = None  # [T, N H] to be written for a draft head: see `Decoder.tap`
    hidden: Tensor | None = None  # [T, H] of a draft head's step: rows that go with the tokens
    ancestors: Tensor | None = None  # [T] int32: new tokens of its row that a token sees, by bits; 0: those before it


class SampleSpec(NamedTuple):
    """S outputs of a step, in the order of its rows of logits."""

    rows: Ints  # [S] rows of the sequences
    positions: Ints  # [S] of the tokens to sample or score
    places: Ints  # [S] of the same tokens in the flat InputBatch.tokens
    detours: Ints | None = None  # [S, D] how far the D drafts before each are from where a chain has them; None: not


class LogitsChunk(NamedTuple):
    """How to process n consecutive outputs of a step."""

    span: slice  # of the S outputs
    chosen: Ints | None  # [c] which of the n to sample, the others are given; None: all are sampled
    sampling: SamplingBatch  # of the c, without `counts` and `extra_ids`, which are on the device
    has_penalties: bool  # any of the c
    drafts: Ints | None  # [g] places of the extra ids in the flat InputBatch.tokens
    scored: list[int]  # which of the n need log-probabilities
    num_top: list[int]  # for each of `scored`


@dataclass(frozen=True, slots=True)
class Prepared:
    """Immutable."""

    layout: Layout
    outputs: SampleSpec
    chunks: list[LogitsChunk]
    num_logits: Ints  # [B] of each request
    num_drafts: Ints  # [B] tokens after the first sampled one's row that the step checks
    num_drafted: int = 0  # most of a request's last tokens that are drafts of the one that makes the next
