"""What a step does with its rows of logits, laid out on the host before the step runs.

Each row of logits is an output: a token to sample, or a given token to score. Outputs are processed in chunks, so that
the logits of a long prompt do not fill the memory.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardRow, Layout
from engine.input_batch import InputBatch
from engine.ranges import Ints, find_starts, join_ranges
from engine.sampling.batch import SamplingBatch


class SampleSpec(NamedTuple):
    """S outputs of a step, in the order of its rows of logits."""

    rows: Ints  # [S] rows of the sequences
    positions: Ints  # [S] of the tokens to sample or score
    places: Ints  # [S] of the same tokens in the flat InputBatch.tokens
    counted: Ints  # [S] tokens of the sequence that its counts include; from there to `positions` are drafts
    is_given: NDArray[np.bool_]  # [S]
    mask_lines: NDArray[np.int32] | None  # [S] line of `masks`; -1: none
    masks: NDArray[np.int32] | None  # [m, ceil(V / 32)]; None, like the lines, if no output has one
    num_top: list[int | None] | None  # [S] top logprobs to return; None: none, for that output or for all


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
    """The J sequences of a step that have drafts."""

    requests: Ints  # [J] their indices
    rows: Ints  # [J]
    num_drafts: Ints  # [J]
    inputs: Ints  # [J, K] the drafts among the step's T tokens, aligned right
    outputs: Ints  # [J, K] what the model chose in their place, among the S outputs


def plan_drafts(requests: Sequence[ForwardRow], layout: Layout) -> DraftSpec | None:
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


def with_masks(
    outputs: SampleSpec,
    chunks: Sequence[LogitsChunk],
    requests: Sequence[ForwardRow],
    masks: Mapping[int, NDArray[np.int32]],
    vocab_size: int,
) -> list[LogitsChunk]:
    """The chunks with masks for some requests, by index. ValueError if a mask does not fit."""
    if not masks:
        return list(chunks)
    lines, joined = _join_masks([part._replace(mask=masks.get(at)) for at, part in enumerate(requests)], vocab_size)
    found = []
    for chunk in chunks:
        own = lines[chunk.span] if chunk.chosen is None else lines[chunk.span][chunk.chosen]
        found.append(chunk._replace(sampling=chunk.sampling._replace(masks=joined, mask_line=own)))
    return found


def plan_samples(rows: InputBatch, requests: Sequence[ForwardRow], layout: Layout) -> SampleSpec:
    """Also counts all tokens that are not drafts, for penalties. ValueError if a mask does not fit."""
    columns = list(zip(*requests, strict=True))
    row, num_logits, num_given, num_drafted = (np.array(columns[at], np.int64) for at in (0, 3, 4, 8))
    counted = layout.seq_lens - num_logits + num_given + 1 - num_drafted
    is_choosing = num_logits > num_given
    rows.count_tokens(row[is_choosing], counted[is_choosing])
    owners, ranks = join_ranges(np.zeros(len(row), np.int64), num_logits)
    is_given = ranks < num_given[owners]
    mask_lines = masks = None
    if any(map(is_not, columns[7], repeat(None))):
        mask_lines, masks = _join_masks(requests, rows.vocab_size)
    return SampleSpec(
        row[owners],
        layout.positions[layout.logits_rows] + 1,
        layout.places[layout.logits_rows] + 1,
        counted[owners],
        is_given,
        mask_lines,
        masks,
        _list_num_top(requests) if np.count_nonzero(num_given) or columns[6].count(None) < len(requests) else None,
    )


def _join_masks(requests: Sequence[ForwardRow], vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[S] the line of each output, -1 for no mask, and the lines: [m, ceil(V / 32)]."""
    lines: list[int] = []
    masks: list[NDArray[np.int32]] = []
    num_lines = 0
    for part in requests:
        num_chosen = part.num_logits - part.num_given
        lines += [-1] * part.num_given
        if part.mask is None:
            lines += [-1] * num_chosen
            continue
        expected = (num_chosen, -(-vocab_size // 32))
        if part.mask.shape != expected or part.mask.dtype != np.int32:
            raise ValueError(f"the mask is {part.mask.dtype} {part.mask.shape}, expected int32 {expected}")
        masks.append(part.mask)
        lines += range(num_lines, num_lines + num_chosen)
        num_lines += num_chosen
    return np.array(lines, np.int32), np.concatenate(masks)


def _list_num_top(requests: Sequence[ForwardRow]) -> list[int | None]:
    return [
        part.given_logprobs if rank < part.num_given else part.chosen_logprobs
        for part in requests
        for rank in range(part.num_logits)
    ]


def plan_chunk(rows: InputBatch, outputs: SampleSpec, span: slice) -> LogitsChunk:
    """Gathers the parameters of the outputs to sample."""
    is_given = outputs.is_given[span]
    chosen = (~is_given).nonzero()[0] if np.count_nonzero(is_given) else None

    def take(values: NDArray[Any]) -> NDArray[Any]:
        return values[span] if chosen is None else values[span][chosen]

    row, positions = take(outputs.rows), take(outputs.positions)
    counts_line = rows.counts_line[row]
    has_penalties = bool(np.count_nonzero(counts_line >= 0))
    extra_starts = drafts = None
    if has_penalties:
        num_extra = np.where(counts_line >= 0, positions - take(outputs.counted), 0)
        if num_extra.any():
            extra_starts = find_starts(num_extra)
            owners, seen = join_ranges(positions - num_extra, num_extra)
            drafts = row[owners] * rows.width + seen
    has_bias = bool(np.count_nonzero(rows.has_bias[row]))
    bias = [rows.bias.get(one, NO_BIAS) for one in row.tolist()] if has_bias else []
    sampling = SamplingBatch(
        temperature=rows.temperature[row],
        top_k=rows.top_k[row],
        top_p=rows.top_p[row],
        min_p=rows.min_p[row],
        seeds=rows.seeds[row],
        positions=positions,
        repetition=rows.repetition[row],
        frequency=rows.frequency[row],
        presence=rows.presence[row],
        counts=None,
        counts_line=counts_line if has_penalties else None,
        extra_starts=extra_starts,
        extra_ids=None,
        bias_starts=find_starts(np.array([len(ids) for ids, _ in bias])) if has_bias else None,
        bias_ids=np.concatenate([ids for ids, _ in bias]) if has_bias else None,
        bias_values=np.concatenate([values for _, values in bias]) if has_bias else None,
        masks=outputs.masks,
        mask_line=None if outputs.mask_lines is None else take(outputs.mask_lines),
    )
    num_top = [] if outputs.num_top is None else outputs.num_top[span]
    wanted = {output: count for output, count in enumerate(num_top) if count is not None}
    return LogitsChunk(span, chosen, sampling, has_penalties, drafts, list(wanted), list(wanted.values()))


NO_BIAS = np.zeros(0, np.int32), np.zeros(0, np.float32)
