"""A step's plan on the host before it runs, and a fast path for a step that continues the last.

Each row of logits is an output: a token to sample, or a given token to score. Outputs are processed in chunks, so that
the logits of a long prompt do not fill the memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import STATE_FROM, ForwardRow, Layout, check_ends, find_slots, lay_out
from engine.input_batch import InputBatch
from engine.ranges import Ints, find_starts, join_ranges
from engine.sampling.batch import SamplingBatch

PLAIN = ForwardRow(row=0, begin=0, count=1, num_logits=1)  # every request of a plain step, except `row` and `begin`
SIZES, MASK = (2, 3, 4, 5, 6, 8, 9), 7  # indices of the other fields, but for slots
NO_BIAS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class SampleSpec(NamedTuple):
    """S outputs of a step, in the order of its rows of logits."""

    rows: Ints  # [S] rows of the sequences
    positions: Ints  # [S] of the tokens to sample or score
    places: Ints  # [S] of the same tokens in the flat InputBatch.tokens


class LogitsChunk(NamedTuple):
    """How to process n consecutive outputs of a step."""

    span: slice  # of the S outputs
    chosen: Ints | None  # [c] which of the n to sample, the others are given; None: all are sampled
    sampling: SamplingBatch  # of the c, without `counts` and `extra_ids`, which are on the device
    has_penalties: bool  # any of the c
    drafts: Ints | None  # [g] places of the extra ids in the flat InputBatch.tokens
    scored: list[int]  # which of the n need log-probabilities
    num_top: list[int]  # for each of `scored`


class DraftSpec(NamedTuple):
    """The J sequences of a step that have drafts, for a head that has to know which are right."""

    requests: Ints  # [J] their indices
    rows: Ints  # [J]
    num_drafts: Ints  # [J]
    inputs: Ints  # [J, K] the drafts among the step's T tokens, aligned right
    outputs: Ints  # [J, K] what the model chose in their place, among the S outputs


@dataclass(frozen=True, slots=True)
class Prepared:
    """Immutable."""

    layout: Layout
    outputs: SampleSpec
    chunks: list[LogitsChunk]
    drafts: DraftSpec | None = None
    has_drafted: bool = False  # some requests' last tokens are drafts of the one that makes the next


def prepare(rows: InputBatch, requests: Sequence[ForwardRow], chunk_rows: int) -> Prepared:
    """Any step, in chunks of up to `chunk_rows` outputs. Counts all tokens that are not drafts, for penalties.

    ValueError if a request ends beyond its row, or a mask does not fit.
    """
    layout, columns = lay_out(rows, requests), list(zip(*requests, strict=True))
    row, num_logits, num_given, num_drafted = (np.array(columns[at], np.int64) for at in (0, 3, 4, 8))
    counted = layout.seq_lens - num_logits + num_given + 1 - num_drafted
    is_choosing = num_logits > num_given
    rows.count_tokens(row[is_choosing], counted[is_choosing])
    owners, ranks = join_ranges(np.zeros(len(row), np.int64), num_logits)
    outputs = SampleSpec(
        row[owners], layout.positions[layout.logits_rows] + 1, layout.places[layout.logits_rows] + 1
    )  # fmt: skip
    num_top: list[int | None] = []
    if np.count_nonzero(num_given) or any(map(is_not, columns[6], repeat(None))):
        num_top = [
            one.given_logprobs if rank < one.num_given else one.chosen_logprobs
            for one in requests
            for rank in range(one.num_logits)
        ]
    chunks = []
    for begin in range(0, len(owners), chunk_rows):
        span = slice(begin, begin + chunk_rows)
        own = owners[span]
        chunks.append(_plan_chunk(rows, outputs, span, counted[own], ranks[span] < num_given[own], num_top[span]))
    masks = {at: mask for at, mask in enumerate(columns[MASK]) if mask is not None}
    chunks = with_masks(chunks, requests, masks, rows.vocab_size)
    return Prepared(layout, outputs, chunks, _plan_drafts(requests, layout), bool(np.count_nonzero(num_drafted)))


def with_masks(
    chunks: list[LogitsChunk], requests: Sequence[ForwardRow], masks: Mapping[int, NDArray[np.int32]], vocab_size: int
) -> list[LogitsChunk]:
    """The chunks with masks for some requests, by index. ValueError if a mask does not fit."""
    if not masks:
        return chunks
    lines: list[int] = []  # of each of the S outputs
    num_lines = 0
    for at, part in enumerate(requests):
        num_chosen, mask = part.num_logits - part.num_given, masks.get(at)
        lines += [-1] * part.num_given
        if mask is None:
            lines += [-1] * num_chosen
            continue
        expected = (num_chosen, -(-vocab_size // 32))
        if mask.shape != expected or mask.dtype != np.int32:
            raise ValueError(f"the mask is {mask.dtype} {mask.shape}, expected int32 {expected}")
        lines += range(num_lines, num_lines + num_chosen)
        num_lines += num_chosen
    joined, of_outputs = np.concatenate([masks[at] for at in sorted(masks)]), np.array(lines, np.int32)
    found = []
    for chunk in chunks:
        own = of_outputs[chunk.span]
        sampling = chunk.sampling._replace(masks=joined, mask_line=own if chunk.chosen is None else own[chunk.chosen])
        found.append(chunk._replace(sampling=sampling))
    return found


def _plan_chunk(
    rows: InputBatch, outputs: SampleSpec, span: slice, counted: Ints, is_given: NDArray[np.bool_],
    num_top: list[int | None],
) -> LogitsChunk:  # fmt: skip
    """The parameters of the outputs to sample. counted: [n] tokens of the sequence that its counts include; those
    from there to the output are drafts. num_top: top logprobs to return for each output; None for none, as if empty."""
    row, positions, chosen = outputs.rows[span], outputs.positions[span], None
    if np.count_nonzero(is_given):
        chosen = (~is_given).nonzero()[0]
        row, positions, counted = row[chosen], positions[chosen], counted[chosen]
    counts_line = rows.counts_line[row]
    has_penalties = bool(np.count_nonzero(counts_line >= 0))
    extra_starts = drafts = None
    if has_penalties:
        num_extra = np.where(counts_line >= 0, positions - counted, 0)
        if num_extra.any():
            extra_starts = find_starts(num_extra)
            owners, seen = join_ranges(positions - num_extra, num_extra)
            drafts = row[owners] * rows.width + seen
    bias: dict[str, Any] = {}
    if np.count_nonzero(rows.has_bias[row]):
        ids, values = zip(*(rows.bias.get(one, NO_BIAS) for one in row.tolist()), strict=True)
        starts = find_starts(np.array([len(own) for own in ids]))
        bias = {"bias_starts": starts, "bias_ids": np.concatenate(ids), "bias_values": np.concatenate(values)}
    sampling = SamplingBatch(
        rows.params.take(row),  # four times as fast as rows.params[row]
        positions,
        counts_line=counts_line if has_penalties else None,
        extra_starts=extra_starts,
        **bias,
    )
    wanted = {output: count for output, count in enumerate(num_top) if count is not None}
    return LogitsChunk(span, chosen, sampling, has_penalties, drafts, list(wanted), list(wanted.values()))


def _plan_drafts(requests: Sequence[ForwardRow], layout: Layout) -> DraftSpec | None:
    """None if no request has drafts."""
    num_drafts = np.array([part.num_drafts for part in requests], np.int64)
    if not np.count_nonzero(num_drafts):
        return None
    which = num_drafts.nonzero()[0]
    back = np.arange(-int(num_drafts.max()), 0)
    ends = np.add.accumulate([part.num_logits for part in requests])[which] - 1  # the output after the last draft
    return DraftSpec(
        which,
        np.array([part.row for part in requests], np.int64)[which],
        num_drafts[which],
        np.maximum(layout.cu_seqlens_q[1:][which, None] + back, 0),
        np.maximum(ends[:, None] + back, 0),
    )


class Preparer:
    """Owns the last plain step: one new token per sequence, which samples the next. While the sequences are the same,
    a plain step differs from the one before only by positions, and sometimes by a page. One caller at a time."""

    def __init__(self, rows: InputBatch) -> None:
        self._rows = rows
        self._made_of: tuple[object, ...] = ()  # a step made of the same can follow the last
        self._last: Prepared | None = None
        self._pages_version = 0  # InputBatch.pages_version when the last step's page table was read
        self._row_begins: Ints = np.zeros(0, np.int64)  # [B] of each row in the flat InputBatch.tokens

    def prepare(self, requests: Sequence[ForwardRow], chunk_rows: int) -> Prepared:
        """Equal to `prepare`. Parts that a plain step shares with the one before are the same objects."""
        columns, rows = list(zip(*requests, strict=True)), self._rows
        if not is_plain(columns):
            return prepare(rows, requests, chunk_rows)
        made_of = columns[0], rows.version, chunk_rows
        if self._last is not None and self._made_of == made_of:
            step = self._follow(self._last, columns[1], columns[STATE_FROM:])
        else:
            step = prepare(rows, requests, chunk_rows)
            self._row_begins = step.outputs.rows * rows.width
        self._last, self._made_of, self._pages_version = step, made_of, rows.pages_version
        if step.layout.images is not None:  # what follows has other ones
            self._last = None
        return step

    def _follow(self, last: Prepared, begins: Sequence[int], slots: Sequence[Sequence[int]]) -> Prepared:
        """[B], [2][B] -> the step at those positions of the same sequences. ValueError if one ends beyond its row."""
        rows, layout, outputs, chunks = self._rows, last.layout, last.outputs, last.chunks
        longest = max(begins) + 1
        check_ends(rows, longest)
        positions = np.array(begins, np.int64)  # [B]
        ends = positions + 1
        num_pages = -(-longest // rows.page_tokens)
        page_table = layout.page_table
        if self._pages_version != rows.pages_version or num_pages != page_table.shape[1]:
            page_table = rows.page_table[outputs.rows, :num_pages]
        if any(chunk.has_penalties for chunk in chunks):
            rows.count_tokens(outputs.rows, ends)
        return Prepared(
            layout._replace(
                places=self._row_begins + positions,
                positions=positions,
                seq_lens=ends.astype(np.int32),
                page_table=page_table,
                slot_mapping=rows.slots(outputs.rows, positions),
                slots=find_slots(rows, slots),
                turns=None if layout.turns is None else layout.turns + (positions - layout.positions),
            ),
            outputs._replace(positions=ends, places=self._row_begins + ends),
            [chunk._replace(sampling=chunk.sampling._replace(positions=ends[chunk.span])) for chunk in chunks],
        )


def is_plain(columns: Sequence[tuple[Any, ...]]) -> bool:
    """Whether a step's requests, given field by field, form a plain step."""
    if any(map(is_not, columns[MASK], repeat(None))):
        return False
    return all(columns[at] == (PLAIN[at],) * len(columns[at]) for at in SIZES)
