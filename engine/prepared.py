"""Makes a step's values (engine/batch.py): its plan on the host before it runs, and its batch on the device.

Each row of logits is an output: a token to sample, or a given token to score. Outputs are processed in chunks, so that
the logits of a long prompt do not fill the memory.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import NO_SLOTS, Batch, ForwardRow, Layout, LogitsChunk, Prepared, SampleSpec, States
from engine.input_batch import InputBatch
from engine.masks import with_masks
from engine.sampling.batch import SamplingBatch
from engine.staging import Ints, find_starts, join_ranges, upload

NO_BIAS = np.zeros(0, np.int32), np.zeros(0, np.float32)


def columns_of(requests: Sequence[ForwardRow]) -> Any:
    """A ForwardRow whose fields are tuples of all requests' values."""
    return ForwardRow._make(zip(*requests, strict=True))


def lay_out(rows: InputBatch, requests: Sequence[ForwardRow]) -> Layout:
    """Where the requests' tokens and pages are. ValueError if a request ends beyond its row."""
    columns = columns_of(requests)
    return _lay_out(rows, columns, np.array(columns[:4], np.int64))


def _lay_out(rows: InputBatch, columns: Any, integers: Ints) -> Layout:  # [4, B], the first columns
    row, begins, counts, num_logits = integers
    ends = begins + counts
    longest = int(ends.max())
    if longest >= rows.width:
        raise ValueError(f"{longest} positions and a token after them, in a row of {rows.width}")
    owners, positions = join_ranges(begins, counts)
    token_rows = row[owners]
    starts = find_starts(counts)
    layout = Layout(
        places=token_rows * rows.width + positions,
        positions=positions,
        cu_seqlens_q=starts,
        seq_lens=ends.astype(np.int32),
        page_table=rows.page_table[row, : -(-longest // rows.page_tokens)],
        slot_mapping=rows.slots(token_rows, positions),
        logits_rows=join_ranges(starts[1:] - num_logits, num_logits)[1],
        slots=np.array((columns.state_from, columns.state_to), np.int64) if rows.states else NO_SLOTS,
        query_lens=counts.astype(np.int32),
    )
    if any(columns.parents):
        assert rows.lay_out_trees is not None, "trees of drafts, for a model that takes chains"
        layout = rows.lay_out_trees(layout, columns.parents)
    added = [own for feature in (rows.adapters, rows.images) if (own := feature.lay_out(row, layout)) is not None]
    return layout._replace(features=(*layout.features, *added)) if added else layout


def build_batch(layout: Layout, rows: InputBatch) -> Batch:
    """The batch on the device of `rows`. The device reads the tokens from the rows when it gets here."""
    places, *fields = upload(layout[:-2], rows.device)
    positions, cu_seqlens_q, seq_lens, page_table, slot_mapping, logits_rows, slots = fields
    batch = Batch(
        rows.tokens.take(places).long(), places, positions, cu_seqlens_q, seq_lens, page_table, slot_mapping,
        logits_rows,
        query_lens_host=layout.query_lens, seq_lens_host=layout.seq_lens,
        states=States(rows.states, slots[0], slots[1]) if rows.states else None,
    )  # fmt: skip
    for feature in layout.features:
        batch = feature.add_to(batch)
    return batch


def prepare(rows: InputBatch, requests: Sequence[ForwardRow], chunk_rows: int) -> Prepared:
    """Any step, in chunks of up to `chunk_rows` outputs. Counts all tokens that are not drafts, for penalties.

    ValueError if a request ends beyond its row, or a mask does not fit.
    """
    columns = columns_of(requests)
    integers = np.array((*columns[:4], columns.num_given, columns.num_drafted), np.int64)
    layout = _lay_out(rows, columns, integers[:4])
    row, _, _, num_logits, num_given, num_drafted = integers
    counted = layout.seq_lens - num_logits + num_given + 1 - num_drafted
    is_counted = (num_logits > num_given) & (rows.counts_line[row] >= 0)
    if np.count_nonzero(is_counted):
        rows.count_tokens(row[is_counted], counted[is_counted])
    owners, ranks = join_ranges(np.zeros(len(row), np.int64), num_logits)
    at, detours = layout.logits_rows, layout.features[0].detours if layout.features else None
    outputs = SampleSpec(row[owners], layout.positions[at] + 1, layout.places[at] + 1, detours)
    num_top: list[int | None] = []
    if any(columns.num_given) or columns.chosen_logprobs.count(None) < len(requests):
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
    masks = {at: mask for at, mask in enumerate(columns.mask) if mask is not None}
    if masks:
        chunks = with_masks(chunks, requests, masks, rows.vocab_size)
    num_drafts = np.maximum(num_logits - num_given - 1, 0)
    return Prepared(layout, outputs, chunks, num_logits, num_drafts, max(columns.num_drafted))


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
            if outputs.detours is not None:
                of_chosen = outputs.detours[span][slice(None) if chosen is None else chosen]
                seen = seen + of_chosen[owners, seen - counted[owners]]
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
