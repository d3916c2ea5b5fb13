"""A matrix of each expert in few bits, [E, N, K], for cuda/gpu_stacks.py: in the bits of the file, each value exact."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from engine.formats.fp8 import BLOCK, Fp8Matrix
from engine.formats.groups import GROUP, Groups, StoredGroups, Tables, join_groups, store_groups
from engine.formats.quantised_forms import MXFP4_CODES, MXFP4_ZERO
from engine.weights.formats import Stack

BIAS = 127  # of e8m0's exponents
SIGN = 8  # of e2m1's codes
NO_CODE = 255
CODES = torch.full((256,), NO_CODE, dtype=torch.uint8)  # what a code of `Groups` is in e2m1
CODES[MXFP4_CODES.flip(0).long()] = torch.arange(15, -1, -1, dtype=torch.uint8)  # the first of two zeros


def stack_fp8(parts: Sequence[Sequence[Fp8Matrix]], device: torch.device) -> Stack:
    """parts: of each expert, with scales alike. scale: [E, N, 1], or [E, N, K / BLOCK] float32"""
    codes = torch.stack([torch.cat([part.codes for part in one]).to(device) for one in parts])
    scale = torch.stack([torch.cat([part.scale for part in one]).to(device) for one in parts])
    return Stack(codes, "e4m3", scale.unsqueeze(2) if scale.ndim == 2 else scale)


def stack_groups(parts: Sequence[Sequence[Groups]], device: torch.device) -> Stack:
    """parts: of each expert, in equally many bits. See `StoredGroups`; of MXFP4 `stack_mxfp4`."""
    if (found := stack_mxfp4(parts, device)) is not None:
        return found
    tables = Tables.smallest([*chain.from_iterable(parts)])
    stored = [store_groups(join_groups(one), device, tables) for one in parts]
    seconds = [one.second for one in stored if one.second is not None]
    kind = "minimums" if stored[0].has_minimums else "groups"
    return Stack(
        torch.stack([one.codes for one in stored]), f"{kind}{stored[0].bits}",
        torch.stack([one.scale for one in stored]), torch.stack(seconds) if seconds else None,
    )  # fmt: skip


def stack_mxfp4(parts: Sequence[Sequence[Groups]], device: torch.device) -> Stack | None:
    """codes: [E, N, K / 2], two of e2m1 in a byte as in `StoredGroups`; scale: [E, N, K / 32] e8m0, doubled as the
    codes' values are halves. None if these are other groups."""
    codes, scales = [], []
    for one in parts:
        groups = join_groups(one)
        own, (mantissa, exponent) = CODES[groups.codes.long()], torch.frexp(groups.scale)
        scale = exponent + (BIAS - 1)
        is_e8m0 = bool((mantissa == 0.5).all()) and int(scale.min()) > 0 and int(scale.max()) < 255
        if bool((own == NO_CODE).any()) or not is_e8m0 or not torch.equal(groups.minimum, -MXFP4_ZERO * groups.scale):
            return None
        halves = own.unflatten(1, (-1, 2, GROUP // 2))  # type: ignore[no-untyped-call]
        codes.append((halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).to(device))
        scales.append(scale.to(device, torch.uint8))
    return Stack(torch.stack(codes), "mxfp4", torch.stack(scales))


def widen(stack: Stack) -> Tensor:
    """[E, N, K] float32: the slow twin of gpu_stacks.load_weights."""
    codes, scale = stack.codes, stack.scale
    if scale is None:
        return codes.float()
    if stack.form == "e4m3":
        return (
            codes.float()
            * scale.repeat_interleave(BLOCK if scale.shape[2] > 1 else codes.shape[2], 2)[:, :, : codes.shape[2]]
        )
    if stack.form == "mxfp4":
        halves = codes.unflatten(2, (-1, GROUP // 2))  # type: ignore[no-untyped-call]
        values = MXFP4_CODES[torch.cat((halves & 15, halves >> 4), 3).long()].float() - MXFP4_ZERO
        found: Tensor = (values * torch.exp2(scale.float() - BIAS)[..., None]).flatten(2)
        return found
    bits, has_minimums = int(stack.form[-1]), stack.form.startswith("minimums")
    seconds = [None] * len(codes) if stack.second is None else stack.second
    parts = zip(codes, scale, seconds, strict=True)
    return torch.stack([StoredGroups(*part, bits, has_minimums).dense() for part in parts])
