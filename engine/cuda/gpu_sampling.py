"""Sampling on a GPU: the tokens of `sample_slowly` in engine/sampling/sample.py, for a whole batch, without a sort.

Never waits for the device, and no host decision depends on device values, so a CUDA graph can capture it. Order the
tokens by falling value, lower ids first: the filters keep a prefix of that order. So the token with the best score wins
if it is kept. If it is not, no later token is kept either, and the best score before it is the next candidate. Nearly
always the first or the second candidate wins.

One program works on each block of a row; `_open_rows` and `_choose_rows`, one program per row, join them. Nothing here
has run on a GPU yet: sizes are reasoned, not measured.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.fields import SamplingTensors
from engine.cuda.gpu_logits import BLOCK, GROUP, INFINITY, adjust, bound, load_param, open_row
from engine.cuda.gpu_noise import gumbel_noise
from engine.cuda.gpu_values import find_kth, load_min_p, load_temperature, load_top_k, scale, weigh
from wire.sampling import LEAST_TEMPERATURE

SLOTS = tl.constexpr(32)  # per block, for values that top_k may keep; if a block has more, the whole row is searched
NUM_PLANES = 3  # block statistics over all tokens, those before the first candidate, and those before the second

_LEAST_TEMPERATURE = tl.constexpr(LEAST_TEMPERATURE)


class Scratch(NamedTuple):
    """Tensors that one call's kernels pass to each other. B blocks."""

    adjusted: Tensor  # [S, V] float32, written for rows that `is_adjusted`
    maxima: Tensor  # [S, B * BLOCK / GROUP] float32, adjusted
    tops: Tensor  # [S] float32, the largest adjusted value; -inf: the row's token is chosen
    lowest: Tensor  # [S] float32, scaled: top_k keeps nothing below it
    scores: Tensor  # [NUM_PLANES, S, B] float32, a block's best score among the plane's tokens
    ids: Tensor  # [NUM_PLANES, S, B] int32, its token; -1: the plane is not needed
    masses: Tensor  # [NUM_PLANES, S, B] float64, sum of e^scaled over the plane's tokens, if top_p needs it
    members: Tensor  # [S, B, SLOTS] float32, adjusted values not below `lowest`, then -inf; only where top_k > 0
    num_members: Tensor  # [S, B] int32; may exceed SLOTS


def choose_tokens(logits: Tensor, fields: SamplingTensors, out: Tensor) -> None:
    """[S, V] float32, out: [S] int64 -> tokens, or NO_TOKEN or NOT_A_NUMBER. Does not modify `logits`.

    The caller checks the fields (`SamplingBatch.check`). All tensors are contiguous and on one device.
    """
    num_rows, vocabulary = logits.shape
    if not num_rows:
        return
    fields = fields.split()
    num_blocks = triton.cdiv(vocabulary, BLOCK.value)
    scratch = allocate(logits, num_blocks)
    rows, blocks = (num_rows,), (num_rows, num_blocks)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    joining = options | {"padded_blocks": max(16, triton.next_power_of_2(num_blocks))}
    adjust[blocks](logits, scratch.adjusted, fields, scratch.maxima, vocabulary, **options)
    _open_rows[rows](logits, fields, scratch, out, vocabulary, num_blocks, **joining)
    for plane in range(NUM_PLANES):
        _survey_blocks[blocks](logits, fields, scratch, vocabulary, plane=plane, **joining)
    _choose_rows[rows](logits, fields, scratch, out, vocabulary, num_blocks, **joining)


def allocate(logits: Tensor, num_blocks: int) -> Scratch:
    num_rows = len(logits)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    return Scratch(
        adjusted=torch.empty_like(logits),
        maxima=empty(num_rows, num_blocks * (BLOCK.value // GROUP.value)),
        tops=empty(num_rows),
        lowest=empty(num_rows),
        scores=empty(NUM_PLANES, num_rows, num_blocks),
        ids=empty(NUM_PLANES, num_rows, num_blocks, dtype=torch.int32),
        masses=empty(NUM_PLANES, num_rows, num_blocks, dtype=torch.float64),
        members=empty(num_rows, num_blocks, SLOTS.value),
        num_members=empty(num_rows, num_blocks, dtype=torch.int32),
    )


# --- before any block: the maximum


@triton.jit
def _open_rows(
    logits, fields, scratch, out, vocabulary, num_blocks,
    padded_blocks: tl.constexpr,
):  # fmt: skip
    """Prepare a row for its blocks; choose the token of a greedy row. Grid: (S,)."""
    row = tl.program_id(0)
    num_groups = num_blocks * (BLOCK // GROUP)
    group_ids = tl.arange(0, padded_blocks * (BLOCK // GROUP))
    own = scratch.maxima + row * num_groups
    maxima = tl.load(own + group_ids, mask=group_ids < num_groups, other=-INFINITY)
    top, group = tl.max(maxima, 0, return_indices=True)
    temperature = load_temperature(fields, row)
    first = tl.load(logits + row.to(tl.int64) * vocabulary)
    is_nan = first != first  # all are: the hidden state was NaN
    is_done = is_nan | (top == -INFINITY) | (temperature < _LEAST_TEMPERATURE)
    tl.store(scratch.tops + row, tl.where(is_done, -INFINITY, top))
    if is_done:
        values, least = open_row(logits, scratch.adjusted, fields, row, vocabulary)
        ids = group * GROUP + tl.arange(0, GROUP)
        is_token = ids < vocabulary
        is_top = is_token & (bound(tl.load(values + ids, mask=is_token, other=0.0), least) == top)
        token = tl.min(tl.where(is_top, ids, vocabulary), 0)
        token = tl.where(is_nan, -2, tl.where(top == -INFINITY, -1, token))
        tl.store(out + row, token.to(tl.int64))
    else:
        top_k = load_top_k(fields, row, vocabulary)
        if (top_k > 0) & (top_k <= num_groups):
            lowest = find_kth(own, num_groups, top_k, -INFINITY, top, temperature)
            tl.store(scratch.lowest + row, lowest)
        else:
            tl.store(scratch.lowest + row, -INFINITY)


# --- blocks


@triton.jit
def _survey(
    masses, scores, best_ids, block, limit, limit_id, lowest, is_weighed,
    values, least, top, fields, scratch, row, vocabulary, num_blocks,
):  # fmt: skip
    """Add a block to running [BLOCK] masses, best scores and their tokens, lane by lane.

    Counts only tokens before (limit, limit_id): masses if `is_weighed`, scores from `lowest` up.
    """
    temperature = load_temperature(fields, row)
    groups = (row * num_blocks + block) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    highest = scale(tl.max(tl.load(scratch.maxima + groups), 0), -INFINITY, top, temperature)
    if highest >= limit:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        is_token = ids < vocabulary
        scaled = scale(tl.load(values + ids, mask=is_token, other=-INFINITY), least, top, temperature)
        is_before = is_token & ((scaled > limit) | ((scaled == limit) & (ids < limit_id)))
        if is_weighed:
            masses += tl.where(is_before, tl.exp(scaled.to(tl.float64)), 0.0)
        if highest >= lowest:
            noise = gumbel_noise(ids, load_param(fields.params.seed, row), tl.load(fields.positions + row))
            is_better = is_before & (scaled >= lowest) & (scaled + noise > scores)
            scores = tl.where(is_better, scaled + noise, scores)
            best_ids = tl.where(is_better, ids, best_ids)
    return masses, scores, best_ids


@triton.jit
def _join(scores, ids):
    """The best score, and the lowest id that has it."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), 0)


@triton.jit
def _load_best(scratch, plane, row, num_blocks, padded_blocks: tl.constexpr):
    blocks = tl.arange(0, padded_blocks)
    at = (plane * tl.num_programs(0) + row) * num_blocks + blocks
    scores = tl.load(scratch.scores + at, mask=blocks < num_blocks, other=-INFINITY)
    _, token = _join(scores, tl.load(scratch.ids + at, mask=blocks < num_blocks, other=0x7FFFFFFF))
    return token


@triton.jit
def _load_mass(scratch, plane, row, num_blocks, padded_blocks: tl.constexpr):
    blocks = tl.arange(0, padded_blocks)
    at = (plane * tl.num_programs(0) + row) * num_blocks + blocks
    return tl.sum(tl.load(scratch.masses + at, mask=blocks < num_blocks, other=0.0), 0)


@triton.jit
def _gather(block, lowest, values, least, top, fields, scratch, row, vocabulary, num_blocks):
    """Write a block's values from `lowest` up to its slots, lower ids first."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    own = bound(tl.load(values + ids, mask=ids < vocabulary, other=-INFINITY), least)
    is_member = (ids < vocabulary) & (scale(own, least, top, load_temperature(fields, row)) >= lowest)
    ranks = tl.cumsum(is_member.to(tl.int32), 0) - 1
    count = tl.sum(is_member.to(tl.int32), 0)
    slots = tl.arange(0, SLOTS)
    members = scratch.members + (row * num_blocks + block) * SLOTS
    tl.store(members + ranks, own, mask=is_member & (ranks < SLOTS))
    tl.store(members + slots, -INFINITY, mask=slots >= count)
    tl.store(scratch.num_members + row * num_blocks + block, count)


@triton.jit
def _survey_blocks(
    logits, fields, scratch, vocabulary,
    plane: tl.constexpr, padded_blocks: tl.constexpr,
):  # fmt: skip
    """Fill one block of a row for one plane of `Scratch`. Grid: (S, blocks)."""
    row, block = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    top = tl.load(scratch.tops + row)
    top_k, top_p = load_top_k(fields, row, vocabulary), load_param(fields.params.top_p, row)
    is_over = top == -INFINITY
    if plane > 0:
        is_over |= (top_k == 0) & (top_p >= 1)
    if plane > 1:
        total = _load_mass(scratch, 0, row, num_blocks, padded_blocks)
        is_over |= (top_k > 0) | (_load_mass(scratch, plane - 1, row, num_blocks, padded_blocks) < top_p * total)
    at = (plane * tl.num_programs(0) + row) * num_blocks + block
    if is_over:
        tl.store(scratch.ids + at, -1)
        return
    values, least = open_row(logits, scratch.adjusted, fields, row, vocabulary)
    temperature = load_temperature(fields, row)
    lowest = tl.load(scratch.lowest + row)
    if plane == 0:
        limit, limit_id = -INFINITY, vocabulary
        if top_k > 0:
            _gather(block, lowest, values, least, top, fields, scratch, row, vocabulary, num_blocks)
    else:
        limit_id = _load_best(scratch, plane - 1, row, num_blocks, padded_blocks)
        limit = scale(tl.load(values + limit_id), least, top, temperature)
    is_weighed = (top_p < 1) & ((plane > 0) | (top_k == 0))  # a row with top_k weighs its members instead
    masses, scores, ids = _survey(
        tl.zeros([BLOCK], tl.float64), tl.full([BLOCK], -INFINITY, tl.float32), tl.zeros([BLOCK], tl.int32),
        block, limit, limit_id, tl.maximum(lowest, load_min_p(fields, row)), is_weighed,
        values, least, top, fields, scratch, row, vocabulary, num_blocks,
    )  # fmt: skip
    score, token = _join(scores, ids)
    tl.store(scratch.scores + at, score)
    tl.store(scratch.ids + at, token)
    tl.store(scratch.masses + at, tl.sum(masses, 0))


# --- the token


@triton.jit
def _choose_rows(
    logits, fields, scratch, out, vocabulary, num_blocks,
    padded_blocks: tl.constexpr,
):  # fmt: skip
    """Choose the token of a row that is not greedy. Grid: (S,)."""
    row = tl.program_id(0)
    top = tl.load(scratch.tops + row)
    if top == -INFINITY:
        return
    token = _load_best(scratch, 0, row, num_blocks, padded_blocks)
    top_k, top_p = load_top_k(fields, row, vocabulary), load_param(fields.params.top_p, row)
    if (top_k > 0) | (top_p < 1):
        values, least = open_row(logits, scratch.adjusted, fields, row, vocabulary)
        temperature = load_temperature(fields, row)
        lowest = tl.maximum(tl.load(scratch.lowest + row), load_min_p(fields, row))
        before = _load_mass(scratch, 1, row, num_blocks, padded_blocks)
        following = _load_best(scratch, 1, row, num_blocks, padded_blocks)
        floor = lowest
        if top_k > 0:
            blocks = tl.arange(0, padded_blocks)
            num_members = tl.load(scratch.num_members + row * num_blocks + blocks, mask=blocks < num_blocks, other=0)
            is_short = tl.max(num_members, 0) <= SLOTS
            searched = tl.where(is_short, scratch.members + row * num_blocks * SLOTS, values)
            count = tl.where(is_short, num_blocks * SLOTS, vocabulary)
            lowest_there = tl.where(is_short, -INFINITY, least)
            floor = find_kth(searched, count, top_k, lowest_there, top, temperature)
            total = weigh(searched, count, floor, lowest_there, top, temperature)
        else:
            total = _load_mass(scratch, 0, row, num_blocks, padded_blocks)
            if tl.load(scratch.ids + (2 * tl.num_programs(0) + row) * num_blocks) >= 0:
                token = following
                before = _load_mass(scratch, 2, row, num_blocks, padded_blocks)
                following = _load_best(scratch, 2, row, num_blocks, padded_blocks)
        goal = tl.where(top_p < 1, top_p * total, INFINITY)
        value = scale(tl.load(values + token), least, top, temperature)
        while (value < floor) | ((before > 0) & (before >= goal)):  # the first token in the order is always kept
            token = following
            value = scale(tl.load(values + token), least, top, temperature)
            masses = tl.zeros([BLOCK], tl.float64)
            scores, ids = tl.full([BLOCK], -INFINITY, tl.float32), tl.zeros([BLOCK], tl.int32)
            for block in range(num_blocks):
                masses, scores, ids = _survey(
                    masses, scores, ids, block, value, token, lowest, top_p < 1,
                    values, least, top, fields, scratch, row, vocabulary, num_blocks,
                )  # fmt: skip
            before = tl.sum(masses, 0)
            _, following = _join(scores, ids)
    tl.store(out + row, token.to(tl.int64))
