"""Blocks of quantised GGUF tensors as codes in groups, or as float32. Equal to gguf.quants.dequantize, bit for bit.

Bits of the formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.weights.checkpoint import FLOATS
from engine.weights.groups import GROUP, Groups, with_zeros

OTHERS = (
    "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M",
    "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip  # read by gguf
SUPER = 8  # groups in a block of Q4_K or Q5_K


def read_groups(dtype: str, stored: Tensor) -> Groups | None:
    """[N, bytes] uint8 |-> the same values in groups; None if the format does not fit into them."""
    decode = DECODERS.get(dtype)
    if decode is None:
        return None
    blocks = stored.unflatten(1, (-1, GGML_QUANT_SIZES[GGMLQuantizationType[dtype]][1]))  # type: ignore[no-untyped-call]
    return decode(blocks)


def read_dense(dtype: str, stored: Tensor) -> Tensor:
    """[N, bytes] uint8 |-> [N, K]: floats as stored, others float32. ValueError if gguf cannot read the format."""
    if dtype in FLOATS:
        return stored.view(FLOATS[dtype])
    groups = read_groups(dtype, stored)
    if groups is not None:
        return groups.dense()
    try:
        return torch.from_numpy(dequantize(stored.numpy(), GGMLQuantizationType[dtype]).astype(np.float32, copy=False))
    except NotImplementedError as error:
        raise ValueError(f"tensors of type {dtype} cannot be read") from error


def _half(blocks: Tensor, at: int) -> Tensor:
    """[N, B, bytes] |-> [N, B] float32"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: Tensor) -> Tensor:
    """[.., n] |-> [.., 2 n]: all low ones, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[N, B, 4] |-> [N, B, 32]: bit 4 of each code."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (packed[..., None] >> shifts & 1).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Groups:
    return with_zeros(_nibbles(blocks[..., 2:]).flatten(1), _half(blocks, 0), 8, 4)


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2), 4)


def _q5_0(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return with_zeros(codes.flatten(1), _half(blocks, 0), 16, 8)


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Groups(codes.flatten(1), _half(blocks, 0), _half(blocks, 2), 8)


def _q8_0(blocks: Tensor) -> Groups:
    return with_zeros(blocks[..., 2:].flatten(1) ^ 128, _half(blocks, 0), 128, 8)  # as if 128 were added


def _tables(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minimums of Q4_K and Q5_K, of 6 bits times a block's: [N, B * 8] each."""
    low, middle, high = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scale = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimum = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return (
        (_half(blocks, 0)[..., None] * scale.float()).flatten(1),
        -(_half(blocks, 2)[..., None] * minimum.float()).flatten(1),
    )


def _q4_k(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (-1, GROUP)))  # type: ignore[no-untyped-call]
    return Groups(codes.flatten(1), *_tables(blocks), 4)


def _q5_k(blocks: Tensor) -> Groups:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (-1, GROUP))).unflatten(-1, (2, GROUP))  # type: ignore[no-untyped-call]
    shifts = torch.arange(SUPER, dtype=torch.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> shifts & 1) << 4  # [N, B, 8, 32]
    return Groups((low.flatten(2, 3) | high).flatten(1), *_tables(blocks), 8)


DECODERS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
}  # fmt: skip
QUANTISED = (*DECODERS, *OTHERS)
