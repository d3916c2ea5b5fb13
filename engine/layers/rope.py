"""Rotary position embedding: frequencies per dimension pair, and the table of all rotations.

Formulas and the order of float32 operations are those of transformers' `modeling_rope_utils.py`, to the last bits.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.layer_config import RopeConfig


def default_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Dimension pair i |-> theta ** (-2i / head_dim). Returns [head_dim / 2] float32, radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D / 2]
    return 1.0 / (rope.theta**exponents)


def linear_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """All frequencies divided by the factor. Returns [head_dim / 2] float32."""
    return default_frequencies(rope, head_dim) / rope.factor


def llama3_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated. [head_dim / 2]"""
    frequencies = default_frequencies(rope, head_dim)  # [D / 2]
    wavelengths = 2 * math.pi / frequencies  # positions per turn
    longest_kept = rope.original_context / rope.high_freq_factor
    shortest_stretched = rope.original_context / rope.low_freq_factor
    smooth = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    is_long = wavelengths > shortest_stretched
    is_short = wavelengths < longest_kept
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, between))


def yarn_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """A ramp over dimensions from kept to stretched frequencies (YaRN, Peng et al. 2023). [head_dim / 2]"""

    def dimension_of(num_turns: float) -> float:
        # the 2i that turns num_turns times in the original context: theta ** (2i / D) * 2 pi * num_turns = context
        return (head_dim * math.log(rope.original_context / (num_turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)  # [D / 2], over 2 pi
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def longrope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Each wavelength stretched by a factor of its own. [head_dim / 2]"""
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D / 2], over 2 pi
    return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * wavelengths)


def proportional_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The first pairs turn as they would if all did, the others not at all. [head_dim / 2]"""
    num_turned = int(rope.turned_share * head_dim // 2)
    frequencies = linear_frequencies(rope, head_dim)
    frequencies[num_turned:] = 0
    return frequencies


FREQUENCIES: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
    "proportional": proportional_frequencies,
}


def build_rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Position p |-> (cos, sin) of p times each frequency, attention factor included.

    Returns [num_positions, 2, head_dim / 2] float32 on the CPU: 64 MiB for 128 Ki positions and head_dim 128.
    """
    rotated = rope.rotated_dims or head_dim
    frequencies = FREQUENCIES[rope.kind](rope, rotated)  # [rotated / 2]
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies  # [num_positions, rotated / 2]
    table = torch.zeros(num_positions, 2, head_dim // 2)
    table[:, 0] = 1  # pairs beyond the rotated ones stay as they are
    table[:, 0, : rotated // 2] = torch.cos(angles) * rope.attention_factor
    table[:, 1, : rotated // 2] = torch.sin(angles) * rope.attention_factor
    return table


def build_rope_tables(
    ropes: Sequence[RopeConfig], head_dims: Sequence[int], num_positions: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Tables of a model's ropes, each for heads of its own size: [num_positions, 2, D / 2]."""
    tables = (build_rope_table(rope, dim, num_positions) for rope, dim in zip(ropes, head_dims, strict=True))
    return [table.to(device, dtype) for table in tables]
