"""top_k, top_p and min_p as floors: a filter keeps what lies above its floor, and some of what lies on it.

Rows are scaled logits, whose maximum is 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.blocks import Blocks, find_largest, split_for_cache

BUCKETS_PER_NAT, NUM_BUCKETS = 32, 2048  # top_p's histogram spans e^-64 to 1; the last bucket takes what is below
NUM_SORTED = 64  # how many of a row's largest values are sorted at least: most nuclei are smaller


@dataclass(frozen=True, slots=True)
class Filter:
    """What one row keeps."""

    top_k: int  # 0: all
    top_p: float  # 1: all
    min_p: float  # 0: all


@dataclass(frozen=True, slots=True)
class Floors:
    """Token t of row r is kept if its value is above `lowest[r]`, or is that and at most `num_on[r]` are up to t."""

    lowest: Tensor  # [R] float32
    num_on: Tensor  # [R] int64


def find_floors(blocks: Blocks, filters: Sequence[Filter]) -> Floors | None:
    """Apply top_k, then top_p to what that keeps, then min_p. R filters -> R floors; None if no filter is on."""
    num_rows, num_blocks, width = blocks.values.shape
    device = blocks.values.device
    vocabulary = num_blocks * width
    sorting = [row for row, one in enumerate(filters) if one.top_p < 1 or 0 < one.top_k < vocabulary]
    if not sorting and not any(one.min_p > 0 for one in filters):
        return None
    lowest = torch.full((num_rows,), -torch.inf, device=device)
    num_on = torch.full((num_rows,), vocabulary, device=device)
    if sorting:
        found = _find_by_sorting(blocks, sorting, [filters[row] for row in sorting])
        lowest[sorting], num_on[sorting] = found.lowest, found.num_on
    if any(one.min_p > 0 for one in filters):
        likely = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in filters]
        least = torch.tensor(likely, dtype=torch.float32, device=device)
        num_on.masked_fill_(least > lowest, vocabulary)
        lowest = torch.maximum(lowest, least)
    return Floors(lowest, num_on)


def _find_by_sorting(blocks: Blocks, rows: list[int], filters: list[Filter]) -> Floors:
    """The floors of top_k and top_p, of which each of these rows has one or both.

    The C largest values tell all about a row with k <= C and no top_p, one with both if the C-th is below the k-th, and
    one without top_k whose nucleus has at most C tokens. Other rows are looked at one by one.
    """
    device = blocks.values.device
    num_blocks, width = blocks.maxima.shape[1], blocks.values.shape[2]
    vocabulary = num_blocks * width
    counts = [one.top_k if one.top_k < vocabulary else 0 for one in filters]
    num_sorted = min(num_blocks, max(NUM_SORTED, 1 + max(counts)))  # C
    own = blocks if len(rows) == len(blocks.values) else Blocks(blocks.values[rows], blocks.maxima[rows])
    values = find_largest(own, num_sorted)[0]  # [R, C] descending
    masses = values.double().exp()

    top_k = torch.tensor(counts, device=device)  # [R], and so all below
    top_p = torch.tensor([one.top_p for one in filters], dtype=torch.float64, device=device)
    has_k, has_p = top_k > 0, top_p < 1
    kth = values.gather(1, (top_k.clamp(1, num_sorted) - 1)[:, None])  # [R, 1]
    num_kept = torch.where(has_k, (values >= kth).sum(1), vocabulary)
    total = masses.masked_fill(values < kth, 0.0).sum(1)
    nuclei = [i for i, one in enumerate(filters) if not counts[i]]
    if nuclei:
        every = own.values if len(nuclei) == len(rows) else own.values[nuclei]
        total[nuclei] = torch.cat([part.flatten(1).double().exp_().sum(1) for (part,) in split_for_cache(every)])
    size = 1 + (masses.cumsum(1) < (top_p * total)[:, None]).sum(1)
    size = torch.where(has_p, torch.minimum(size, num_kept), top_k)
    lowest = values.gather(1, size.clamp(max=num_sorted)[:, None] - 1)[:, 0]
    is_on = (values == lowest[:, None]) & (torch.arange(num_sorted, device=device) < size[:, None])
    num_on = torch.where(has_p, is_on.sum(1), vocabulary)

    is_all = num_sorted == vocabulary
    is_known = torch.where(has_k & has_p, (values[:, -1:] < kth)[:, 0] | is_all, size <= num_sorted)
    for i, known in enumerate((is_known & (top_k <= num_sorted)).tolist()):
        if not known:
            lowest[i], num_on[i] = _find_floor(own.values[i].flatten(), counts[i], filters[i].top_p)
    return Floors(lowest, num_on)


def _find_floor(values: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor | int]:
    """[n] scaled logits -> the floor of one row, [] float32, and how many are on it.

    Adds up the mass of buckets of like values and sorts only the bucket in which it reaches top_p.
    """
    vocabulary = len(values)
    if top_k:
        kth = values.topk(top_k).values[-1]
        if top_p == 1:
            return kth, vocabulary
        values = values[values >= kth]
    mass = values.double().exp_()
    buckets = (values * -BUCKETS_PER_NAT).clamp_(max=NUM_BUCKETS - 1).to(torch.int64)  # 0 |-> the likeliest
    held = buckets.bincount(mass, NUM_BUCKETS).cumsum(0)
    goal = top_p * held[-1]
    last = int((held < goal).sum())
    inside = values[buckets == last].sort(descending=True).values
    before = held[last - 1] if last else torch.zeros_like(goal)
    num_inside = int((before + inside.double().exp().cumsum(0) < goal).sum()) + 1
    inside = inside[:num_inside]
    return inside[-1], (inside == inside[-1]).sum()


def keep_tokens_slowly(scaled: Tensor, one: Filter) -> Tensor:
    """The slow twin of `find_floors`: [V] scaled logits -> ids that are kept, ascending. Sorts all of them."""
    values, ids = scaled.sort(descending=True, stable=True)
    if 0 < one.top_k < scaled.shape[0]:
        num_kept = int((values >= values[one.top_k - 1]).sum())
        values, ids = values[:num_kept], ids[:num_kept]
    if one.top_p < 1:
        mass = values.double().exp_()
        num_kept = int((mass.cumsum(0) < one.top_p * mass.sum()).sum()) + 1
        values, ids = values[:num_kept], ids[:num_kept]
    if one.min_p > 0:
        ids = ids[values >= math.log(one.min_p)]
    return ids.sort().values
