"""Choosing the next token: argmax(filtered_logits / T + Gumbel(seed, position)).

The noise is counter-based (`noise.py`). So a token depends on nothing but its own logits, parameters and position: not
on the batch, the worker, the device's generator or earlier draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.blocks import Blocks, build_blocks, find_likeliest, join_blocks, split_for_cache
from engine.filters import Filter, Floors, find_floors
from engine.noise import CEILING_GAP, MAX_GUMBEL, build_keys, gumbel_noise, noise_ceilings

LEAST_TEMPERATURE = 1e-6  # below it greedy: noise would move no logit by 2.3e-5, and float32 would make 0 of 1e-46
MOST_TEMPERATURE = 1e30  # what is beyond it counts as it: float32 would make inf of 1e39
PIECE_VALUES = 1 << 21  # logits worked on at once: bounds memory, while calls of torch stay few
DROPPED = 1e38  # subtracted from what cannot win. On a CPU sums with 0 and 1 run 10 times as fast as masks


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token. ValueError at birth names a value out of range."""

    temperature: float = 1.0  # 0, or next to it: the likeliest token, whatever the filters and the seed
    top_p: float = 1.0  # (0, 1]; 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1]; 0: off
    seed: int = 0  # unsigned, 64 bits
    frequency_penalty: float = 0.0  # 0: off; this and what follows is `engine.logits`' business, greedy or not
    presence_penalty: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # more than 0; 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what to add to its logit)

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}, expected a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, expected >= 0")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, expected 0 to 1")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed}, expected an unsigned 64-bit integer")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite number")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, expected a finite number > 0")
        for token, bias in self.logit_bias:
            if token < 0 or not math.isfinite(bias):
                raise ValueError(f"logit_bias adds {bias} to token {token}, expected an id >= 0 and a finite number")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether what has come before matters."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """[S, V] any float dtype, S params, S positions -> [S] int64 on the same device.

    positions[i] is the index in its sequence of the token being chosen. Filters apply in the order temperature, top_k,
    top_p, min_p: top_k keeps every token as likely as the k-th (ties included); top_p the smallest set of those whose
    renormalised probability reaches p, at least one, the lower id first among equals; min_p those at least min_p times
    as likely as the likeliest. Below LEAST_TEMPERATURE the first of the largest logits wins. No row depends on another.
    """
    if not len(params) == len(positions) == logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, {len(params)} params, {len(positions)} positions")
    greedy = [row for row, param in enumerate(params) if param.is_greedy]
    if len(greedy) == len(params):
        return fast_argmax(logits)
    drawn = [row for row, param in enumerate(params) if not param.is_greedy]
    if not greedy:
        return _draw(logits, params, positions)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    tokens[greedy] = fast_argmax(logits[greedy])
    tokens[drawn] = _draw(logits[drawn], [params[row] for row in drawn], [positions[row] for row in drawn])
    return tokens


def fast_argmax(logits: Tensor) -> Tensor:
    """[S, V] -> [S] int64, the first of each row's largest. On the CPU thrice as fast as argmax."""
    return logits.max(-1).indices


def _draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """`sample`, for rows that are not greedy; a piece at a time."""
    bounded = [min(param.temperature, MOST_TEMPERATURE) for param in params]
    temperatures = torch.tensor(bounded, dtype=torch.float32, device=logits.device)
    keys = build_keys([param.seed for param in params], positions, logits.device)
    step = max(1, PIECE_VALUES // logits.shape[1])
    drawn = []
    for piece in (slice(begin, begin + step) for begin in range(0, len(params), step)):
        own = params[piece]
        parts = split_for_cache(logits[piece], temperatures[piece])
        blocks = join_blocks([build_blocks(scale_logits(rows, divisors)) for rows, divisors in parts])
        floors = find_floors(blocks, [Filter(param.top_k, param.top_p, param.min_p) for param in own])
        drawn.append(pick(blocks, floors, keys[piece]))
    return torch.cat(drawn)


def scale_logits(logits: Tensor, temperatures: Tensor) -> Tensor:
    """[S, V], [S] float32 -> [S, V] float32 with maxima 0, so that no temperature overflows.

    In rows of a broken model, without a finite maximum, NaN and -inf count as the lowest number, inf as the highest.
    """
    wide = logits.to(torch.float32)
    maxima = wide.amax(-1, keepdim=True)
    if not maxima.isfinite().all():
        wide = torch.where(maxima.isfinite(), wide, replace_infinite_(wide.clone()))
        maxima = wide.amax(-1, keepdim=True)
    return (wide - maxima).div_(temperatures[:, None])


def replace_infinite_(logits: Tensor) -> Tensor:
    """[...] float32 in place, and returned: NaN and -inf become the lowest number, inf the highest."""
    most = torch.finfo(torch.float32).max
    return logits.nan_to_num_(-most, most, -most)


def pick(blocks: Blocks, floors: Floors | None, keys: Tensor) -> Tensor:
    """R rows, what of them is kept (None: all), [R, 2] keys -> [R] int64: the kept ids with the largest value + noise.

    Goes from blocks that can hold the winner to tokens that can win: the likeliest token's score is a lower bound of
    the winner's and no noise exceeds MAX_GUMBEL; then so is the largest ceiling of a score, less CEILING_GAP.
    """
    num_blocks, width = blocks.values.shape[1:]
    likeliest = find_likeliest(blocks)  # never filtered out: the first of the largest values
    bound = gumbel_noise(likeliest, keys) - MAX_GUMBEL  # [R]; its value is 0
    if floors is not None:
        bound = torch.maximum(bound, floors.lowest)
    at = (blocks.maxima >= bound[:, None]).flatten().nonzero()[:, 0]  # [n], numbered through all rows
    row = at // num_blocks
    ceilings = find_ceilings(blocks, floors, keys, at, row)

    highest = ceilings.amax(-1)  # [n]
    least = _largest_of_rows(highest, row, bound) - CEILING_GAP  # [n]
    near = (highest >= least).nonzero()[:, 0]
    which, column = (ceilings[near] >= least[near, None]).nonzero().unbind(1)
    near = near[which]  # [m], the block of each token that can win
    row, ids = row[near], at[near] % num_blocks * width + column
    scores = blocks.values.view(-1, width)[at[near], column] + gumbel_noise(ids, keys[row])
    is_best = scores == _largest_of_rows(scores, row, bound)
    return likeliest.scatter_reduce(0, row[is_best], ids[is_best], "amin", include_self=False)


def find_ceilings(blocks: Blocks, floors: Floors | None, keys: Tensor, at: Tensor, row: Tensor) -> Tensor:
    """[n] blocks numbered through all rows, ascending, [n] their rows -> [n, W] ceilings of their tokens' scores.

    -DROPPED, about, for tokens that are not kept. Of each row the blocks hold all tokens on its floor, or none.
    """
    num_blocks, width = blocks.values.shape[1:]
    columns = torch.arange(width, dtype=torch.int32, device=at.device)
    ceilings = torch.empty(len(at), width, device=at.device)
    num_on = torch.zeros_like(at)  # of each block, how many tokens are on the floor
    for part, part_on, part_at, part_row in split_for_cache(ceilings, num_on, at, row):
        values = blocks.values.view(-1, width).index_select(0, part_at)
        ids = (part_at % num_blocks).to(torch.int32)[:, None] * width + columns
        torch.add(values, noise_ceilings(ids, keys[part_row, None]), out=part)
        if floors is not None:
            lowest = floors.lowest[part_row, None]
            part.sub_(torch.lt(values, lowest, out=torch.empty_like(values)), alpha=DROPPED)
            part_on.copy_(values.eq_(lowest).sum(1))
    if floors is not None:
        _drop_excess_(ceilings, blocks, floors, num_on, at, row)
    return ceilings


def _drop_excess_(ceilings: Tensor, blocks: Blocks, floors: Floors, num_on: Tensor, at: Tensor, row: Tensor) -> None:
    """Where more tokens are on a row's floor than are kept, drop those with the higher ids."""
    num_in_row = torch.zeros_like(floors.num_on).scatter_add_(0, row, num_on)  # [R]
    which = ((num_in_row > floors.num_on)[row] & (num_on > 0)).nonzero()[:, 0]  # [k]
    row = row[which]
    is_on = blocks.values.view(-1, ceilings.shape[1])[at[which]] == floors.lowest[row, None]  # [k, W]
    num_in_row = torch.zeros_like(num_in_row).scatter_add_(0, row, num_on[which])
    before = num_in_row.cumsum(0) - num_in_row  # on the floors of the rows above
    rank = is_on.flatten().cumsum(0).view(is_on.shape) - before[row, None]  # 1 for a row's first
    ceilings[which] = ceilings[which].masked_fill_(is_on & (rank > floors.num_on[row, None]), -DROPPED)


def _largest_of_rows(values: Tensor, row: Tensor, rows: Tensor) -> Tensor:
    """[n] values, [n] row of each, [R] of their dtype -> [n] the largest value of each one's row."""
    return torch.full_like(rows, -torch.inf).scatter_reduce_(0, row, values, "amax")[row]


def pick_slowly(scaled: Tensor, kept: Tensor, key: Tensor) -> Tensor:
    """The slow twin of `pick`: [V] scaled logits, ids kept (ascending), [2] key -> []. Noise for each of them."""
    return kept[(scaled[kept] + gumbel_noise(kept, key)).argmax()]
