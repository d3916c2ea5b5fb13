"""Counter-based Gumbel noise: a pure integer hash of (seed, position, token id), the same bits on every device.

Changing any constant here changes every user's seeded output; tests pin the values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
MAX_GUMBEL = 22.9  # the largest noise is -log(-log1p(-2^-33)) = 22.874; rounded up
CEILING_GAP = 2.82  # see `noise_ceilings`


def build_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """R seeds, R positions -> [R, 2] int32 on `device`: the two words that scramble token ids."""
    words = [mix64(mix64(seed) ^ position) for seed, position in zip(seeds, positions, strict=True)]
    halves = [[signed32(half) for half in divmod(word, 1 << 32)] for word in words]
    return torch.tensor(halves, dtype=torch.int32).view(-1, 2).to(device)


def gumbel_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """[...] token ids, [..., 2] keys -> [...] float32 Gumbel(0, 1) noise: -log(-log1p(-v)) with v in (0, 1).

    The largest noise, which decides, comes from the smallest v, where float32 is finest.
    """
    words = hash_ids(ids, keys).to(torch.int64).bitwise_and_(_U32)
    uniform = (words.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)  # v = 1 would be noise -inf
    return uniform.neg_().log1p_().neg_().log_().neg_()


def noise_ceilings(ids: Tensor, keys: Tensor) -> Tensor:
    """[...] token ids, [..., 2] keys -> [...] float32: at least the noise, and at most CEILING_GAP more. Half the work.

    -log v is a ceiling as -log1p(-v) >= v. Both grow with 1 / v but not alike: the gap is widest at the largest v,
    1 - 2^-24, with log(-log1p(-v) / v) = 2.812. Rounding v down, by losing the hash's last bit, raises the ceiling, by
    log 3 at most and only where v itself is below 2^-30.
    """
    halves = hash_ids(ids, keys).bitwise_right_shift_(1).bitwise_and_((1 << 31) - 1)
    return halves.to(torch.float32).add_(0.25).mul_(2.0**-31).log_().neg_()


def hash_ids(ids: Tensor, keys: Tensor) -> Tensor:
    """[...] token ids, [..., 2] int32 keys -> [...] int32, whose 32 bits are the hash."""
    words = mix32_(ids.to(torch.int32) ^ keys[..., 0])
    return mix32_(words.add_(keys[..., 1]))


def mix32_(words: Tensor) -> Tensor:
    """Scramble int32 words in place by a bijection (Wellons' lowbias32). torch's int32 products wrap everywhere."""
    words ^= (words >> 16).bitwise_and_(0xFFFF)  # >> keeps the sign: the mask makes it a logical shift
    words *= 0x7FEB352D
    words ^= (words >> 15).bitwise_and_(0x1FFFF)
    words *= signed32(0x846CA68B)
    words ^= (words >> 16).bitwise_and_(0xFFFF)
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
