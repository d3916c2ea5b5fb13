"""Choosing the next token: argmax(filtered_logits / T + Gumbel(seed, position)).

The noise is counter-based: a pure integer hash of (seed, position, token id). So a token depends on nothing but its
own logits, parameters and position: not on the batch, the worker, the device's generator or earlier draws. Changing
any constant here changes every user's seeded output; tests pin the values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
MAX_GUMBEL = 22.9  # the largest noise is -log(-log1p(-2^-33)) = 22.874; rounded up
BUCKETS_PER_NAT, NUM_BUCKETS = 32, 2048  # top_p's histogram spans e^-64 to 1; the last bucket takes what is below


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token. ValueError at birth names a value out of range."""

    temperature: float = 1.0  # 0: the likeliest token, whatever the filters and the seed
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
        if not 0 <= self.seed <= _U64:
            raise ValueError(f"seed is {self.seed}, expected an unsigned 64-bit integer")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite number")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, expected a finite number > 0")
        for token, bias in self.logit_bias:
            if token < 0 or not math.isfinite(bias):
                raise ValueError(f"logit_bias adds {bias} to token {token}, expected an id >= 0 and a finite number")


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """[S, V] any float dtype, S params, S positions -> [S] int64 on the same device.

    positions[i] is the index in its sequence of the token being chosen. Filters apply in the order temperature, top_k,
    top_p, min_p: top_k keeps every token as likely as the k-th (ties included); top_p the smallest set of those whose
    renormalised probability reaches p, at least one, the lower id first among equals; min_p those at least min_p times
    as likely as the likeliest. At temperature 0 the first of the largest logits wins. No row depends on another.
    """
    if not len(params) == len(positions) == logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, {len(params)} params, {len(positions)} positions")
    tokens = logits.argmax(-1)
    rows = [row for row, param in enumerate(params) if param.temperature > 0]
    if rows:
        scaled = scale_logits(logits[rows], [params[row].temperature for row in rows])
        picked = [
            pick(one, keep_tokens(one, params[row]), params[row].seed, positions[row])
            for row, one in zip(rows, scaled, strict=True)
        ]
        tokens[rows] = torch.stack(picked)
    return tokens


def scale_logits(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """[S, V], S temperatures -> [S, V] float32 with maxima 0, so that no temperature overflows."""
    wide = logits.to(torch.float32)
    divisors = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
    return (wide - wide.amax(-1, keepdim=True)).div_(divisors[:, None])


def pick(scaled: Tensor, kept: Tensor | None, seed: int, position: int) -> Tensor:
    """[V] scaled logits, ids kept (ascending, None: all) -> [] int64: the id with the largest logit plus noise.

    Hashes only ids that can still win: the likeliest one's score is a lower bound of the winner's, and no noise
    exceeds MAX_GUMBEL.
    """
    likeliest = scaled.argmax().view(1)  # never filtered out: it has the largest value
    bound = scaled[likeliest] + gumbel_noise(likeliest, seed, position) - MAX_GUMBEL
    ids = (scaled >= bound).nonzero().view(-1) if kept is None else kept[scaled[kept] >= bound]
    return ids[(scaled[ids] + gumbel_noise(ids, seed, position)).argmax()]


def pick_slowly(scaled: Tensor, kept: Tensor | None, seed: int, position: int) -> Tensor:
    """The slow twin of `pick`: noise for every id."""
    ids = torch.arange(scaled.shape[0], device=scaled.device) if kept is None else kept
    return ids[(scaled[ids] + gumbel_noise(ids, seed, position)).argmax()]


def keep_tokens(scaled: Tensor, params: SamplingParams) -> Tensor | None:
    """[V] scaled logits (maximum 0) -> ids the filters keep, ascending; None if no filter is on."""
    kept: Tensor | None = None
    values = scaled
    if 0 < params.top_k < scaled.shape[0]:
        kept = (scaled >= scaled.topk(params.top_k).values[-1]).nonzero().view(-1)
        values = scaled[kept]
    if params.top_p < 1:
        nucleus = find_nucleus(values, params.top_p)
        kept, values = nucleus if kept is None else kept[nucleus], values[nucleus]
    if params.min_p > 0:
        likely = (values >= math.log(params.min_p)).nonzero().view(-1)
        kept = likely if kept is None else kept[likely]
    return kept


def keep_tokens_slowly(scaled: Tensor, params: SamplingParams) -> Tensor:
    """The slow twin of `keep_tokens`: sorts the whole vocabulary. Same contract, but never None."""
    values, ids = scaled.sort(descending=True, stable=True)
    if 0 < params.top_k < scaled.shape[0]:
        num_kept = int((values >= values[params.top_k - 1]).sum())
        values, ids = values[:num_kept], ids[:num_kept]
    if params.top_p < 1:
        mass = values.double().exp()
        num_kept = int((mass.cumsum(0) < params.top_p * mass.sum()).sum()) + 1
        values, ids = values[:num_kept], ids[:num_kept]
    if params.min_p > 0:
        ids = ids[values >= math.log(params.min_p)]
    return ids.sort().values


def find_nucleus(values: Tensor, top_p: float) -> Tensor:
    """[n] scaled logits (maximum 0) -> indices, ascending, of the fewest that hold top_p of the mass.

    Adds up the mass of buckets of like values and sorts only the bucket in which it reaches top_p.
    """
    mass = values.double().exp()
    buckets = (values * -BUCKETS_PER_NAT).clamp_(max=NUM_BUCKETS - 1).to(torch.int64)  # 0 |-> the likeliest
    held = buckets.bincount(mass, NUM_BUCKETS).cumsum(0)
    goal = top_p * held[-1]
    last = int((held < goal).sum())
    inside = (buckets == last).nonzero().view(-1)
    inside = inside[values[inside].sort(descending=True, stable=True).indices]
    before = held[last - 1] if last else torch.zeros_like(goal)
    num_inside = int((before + mass[inside].cumsum(0) < goal).sum()) + 1
    is_kept = buckets < last
    is_kept[inside[:num_inside]] = True
    return is_kept.nonzero().view(-1)


def gumbel_noise(ids: Tensor, seed: int, position: int) -> Tensor:
    """[n] int64 token ids -> [n] float32 Gumbel(0, 1) noise: -log(-log1p(-v)) with v in (0, 1).

    The largest noise, which decides, comes from the smallest v, where float32 is finest.
    """
    words = hash_ids(ids, seed, position)
    uniform = (words.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)  # v = 1 would be noise -inf
    return uniform.neg_().log1p_().neg_().log_().neg_()


def hash_ids(ids: Tensor, seed: int, position: int) -> Tensor:
    """[n] int64 token ids -> [n] int64 in [0, 2^32): the same bits on every device."""
    low, high = (signed32(word) for word in divmod(mix64(mix64(seed) ^ position), 1 << 32))
    words = mix32_(ids.to(torch.int32) ^ low)
    words = mix32_(words.add_(high))
    return words.to(torch.int64).bitwise_and_(_U32)


def mix32_(words: Tensor) -> Tensor:
    """Scramble int32 words in place by a bijection (Wellons' lowbias32). torch's int32 products wrap everywhere."""
    words ^= (words >> 16) & 0xFFFF  # >> keeps the sign: the mask makes it a logical shift
    words *= 0x7FEB352D
    words ^= (words >> 15) & 0x1FFFF
    words *= signed32(0x846CA68B)
    words ^= (words >> 16) & 0xFFFF
    return words


def mix64(word: int) -> int:
    """Scramble a 64-bit word by a bijection (splitmix64), so that neighbouring seeds and positions share nothing."""
    word = (word + 0x9E3779B97F4A7C15) & _U64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _U64
    return word ^ (word >> 31)


def signed32(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word."""
    return word - (1 << 32) if word >> 31 else word
