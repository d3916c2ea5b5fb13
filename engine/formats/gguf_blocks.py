"""Blocks of quantised GGUF tensors as codes in groups, or as float32. Equal to gguf.quants.dequantize, bit for bit.

Bits of the formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.formats.groups import GROUP, Groups, with_zeros
from engine.weights.checkpoint import FLOATS

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


def _read_4_bits(blocks: Tensor, zero: int | None, *, has_fifth: bool = False) -> Groups:
    """A scale, a minimum or none, fifth bits or none, nibbles. zero: the code that stands for it, without a minimum."""
    begin = 4 if zero is None else 2
    codes, bits = _nibbles(blocks[..., begin + 4 * has_fifth :]), 8 if has_fifth else 4
    if has_fifth:
        codes |= _fifth_bits(blocks[..., begin : begin + 4])
    codes, scale = codes.flatten(1), _half(blocks, 0)
    return Groups(codes, scale, _half(blocks, 2), bits) if zero is None else with_zeros(codes, scale, zero, bits)


def _read_8_bits(blocks: Tensor) -> Groups:
    return with_zeros(blocks[..., 2:].flatten(1) ^ 128, _half(blocks, 0), 128, 8)  # as if 128 were added


def _read_super(blocks: Tensor, *, has_fifth: bool = False) -> Groups:
    """Q4_K and Q5_K: 8 groups, whose scales and minimums have 6 bits and are multiplied by a block's."""
    low, middle, high = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scale = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimum = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    nibbles = blocks[..., 48 if has_fifth else 16 :].unflatten(-1, (-1, GROUP))  # type: ignore[no-untyped-call]
    codes = _nibbles(nibbles).unflatten(-1, (2, GROUP)).flatten(2, 3)  # type: ignore[no-untyped-call]  # [N, B, 8, 32]
    if has_fifth:
        shifts = torch.arange(SUPER, dtype=torch.uint8)[:, None]
        codes |= (blocks[..., None, 16:48] >> shifts & 1) << 4
    return Groups(
        codes.flatten(1),
        (_half(blocks, 0)[..., None] * scale.float()).flatten(1),
        -(_half(blocks, 2)[..., None] * minimum.float()).flatten(1),
        8 if has_fifth else 4,
    )


DECODERS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": partial(_read_4_bits, zero=8),
    "Q4_1": partial(_read_4_bits, zero=None),
    "Q5_0": partial(_read_4_bits, zero=16, has_fifth=True),
    "Q5_1": partial(_read_4_bits, zero=None, has_fifth=True),
    "Q8_0": _read_8_bits,
    "Q4_K": _read_super,
    "Q5_K": partial(_read_super, has_fifth=True),
}
QUANTISED = (*DECODERS, *OTHERS)
