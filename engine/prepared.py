"""A step's plan on the host before it runs, and a fast path for a step that continues the last.

A plain step has one new token per sequence and samples the next. While the sequences are the same, it differs from the
one before only by positions, and sometimes by a page; the rest is reused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_not
from typing import Any

import numpy as np

from engine.batch import STATE_FROM, ForwardRow, Layout, check_ends, find_slots, lay_out
from engine.input_batch import InputBatch
from engine.ranges import Ints
from engine.sample_spec import DraftSpec, LogitsChunk, SampleSpec, plan_chunk, plan_drafts, plan_samples

PLAIN = ForwardRow(row=0, begin=0, count=1, num_logits=1)  # every request of a plain step, except `row` and `begin`
SIZES, MASK = (2, 3, 4, 5, 6, 8, 9), 7  # indices of the other fields, but for slots


@dataclass(frozen=True, slots=True)
class Prepared:
    """Immutable."""

    layout: Layout
    outputs: SampleSpec
    chunks: list[LogitsChunk]
    drafts: DraftSpec | None = None


def prepare(rows: InputBatch, requests: Sequence[ForwardRow], chunk_rows: int) -> Prepared:
    """Any step, in chunks of up to `chunk_rows` outputs. Counts tokens for penalties.

    ValueError if a request ends beyond its row, or a mask does not fit.
    """
    layout = lay_out(rows, requests)
    outputs = plan_samples(rows, requests, layout)
    spans = [slice(begin, begin + chunk_rows) for begin in range(0, len(outputs.rows), chunk_rows)]
    chunks = [plan_chunk(rows, outputs, span) for span in spans]
    return Prepared(layout, outputs, chunks, plan_drafts(requests, layout))


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain step and its key: a step with the same key can follow it."""

    made_of: tuple[object, ...]
    pages_version: int  # InputBatch.pages_version when `page_table` was read
    row_begins: Ints  # [B] of each row in the flat InputBatch.tokens
    step: Prepared


class Preparer:
    """Owns the last plain step. One caller at a time."""

    def __init__(self, rows: InputBatch) -> None:
        self._rows = rows
        self._last: Plain | None = None

    def prepare(self, requests: Sequence[ForwardRow], chunk_rows: int) -> Prepared:
        """Equal to `prepare`. Parts that a plain step shares with the one before are the same objects."""
        columns = list(zip(*requests, strict=True))
        if not is_plain(columns):
            return prepare(self._rows, requests, chunk_rows)
        rows, last = self._rows, self._last
        made_of = columns[0], rows.version, chunk_rows
        if last is not None and last.made_of == made_of:
            step, row_begins = follow(last, rows, columns[1], columns[STATE_FROM:]), last.row_begins
        else:
            step = prepare(rows, requests, chunk_rows)
            row_begins = step.outputs.rows * rows.width
        self._last = Plain(made_of, rows.pages_version, row_begins, step)
        return step


def is_plain(columns: Sequence[tuple[Any, ...]]) -> bool:
    """Whether a step's requests, given field by field, form a plain step."""
    if any(map(is_not, columns[MASK], repeat(None))):
        return False
    return all(columns[at] == (PLAIN[at],) * len(columns[at]) for at in SIZES)


def follow(last: Plain, rows: InputBatch, begins: Sequence[int], slots: Sequence[Sequence[int]]) -> Prepared:
    """[B], [2][B] -> the step at those positions of the same sequences. ValueError if one ends beyond its row."""
    layout, outputs, chunks = last.step.layout, last.step.outputs, last.step.chunks
    longest = max(begins) + 1
    check_ends(rows, longest)
    positions = np.array(begins, np.int64)  # [B]
    ends = positions + 1
    num_pages = -(-longest // rows.page_tokens)
    page_table = layout.page_table
    if last.pages_version != rows.pages_version or num_pages != page_table.shape[1]:
        page_table = rows.page_table[outputs.rows, :num_pages]
    if any(chunk.has_penalties for chunk in chunks):
        rows.count_tokens(outputs.rows, ends)
    return Prepared(
        layout._replace(
            places=last.row_begins + positions,
            positions=positions,
            seq_lens=ends.astype(np.int32),
            page_table=page_table,
            slot_mapping=rows.slots(outputs.rows, positions),
            slots=find_slots(rows, slots),
        ),
        outputs._replace(positions=ends, places=last.row_begins + ends, counted=ends),
        [chunk._replace(sampling=chunk.sampling._replace(positions=ends[chunk.span])) for chunk in chunks],
    )
