"""Which tokens rows may choose: masks of grammars, and of answers that must not end yet."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import ForwardRow, LogitsChunk

TokenMask = NDArray[np.int32] | Tensor
"""[ceil(V / 32)] int32 on the CPU: bit t % 32 of word t // 32 is set |-> token t is allowed. xgrammar's layout."""


def can_choose(mask: TokenMask, vocabulary: int) -> bool:
    """Whether the mask allows any token below `vocabulary`. If not, its sequence cannot continue."""
    words = _to_words(mask, vocabulary)
    return bool(words[:-1].any()) or bool(int(words[-1]) & (1 << (vocabulary - 1) % 32 + 1) - 1)


def allowed_words(mask: TokenMask | None, forbidden: Collection[int], vocabulary: int) -> NDArray[np.int32] | None:
    """The mask without the forbidden tokens (min_tokens): [ceil(V / 32)]; None: all tokens. Does not modify it.

    If no token would be left, the forbidden ones stay allowed: min_tokens yields to a grammar that must end.
    ValueError if the mask has the wrong length or allows no token.
    """
    within = np.array([token for token in forbidden if token < vocabulary], np.int64)
    if mask is None and not len(within):
        return None
    words = np.full(-(-vocabulary // 32), -1, np.int32) if mask is None else _to_words(mask, vocabulary)
    if not can_choose(words, vocabulary):
        raise ValueError("the grammar's mask allows no token")
    left = words.copy()
    np.bitwise_and.at(left.view(np.uint32), within // 32, ~(np.uint32(1) << (within % 32).astype(np.uint32)))
    return left if can_choose(left, vocabulary) else words


def _to_words(mask: TokenMask, vocabulary: int) -> NDArray[np.int32]:
    words: NDArray[np.int32] = mask.numpy() if isinstance(mask, Tensor) else mask
    if words.shape != (-(-vocabulary // 32),) or words.dtype != np.int32:
        expected = f"{-(-vocabulary // 32)} of int32 for {vocabulary} tokens"
        raise ValueError(f"the mask has shape {words.shape} of {words.dtype}, expected {expected}")
    return words


def with_masks(
    chunks: list[LogitsChunk], requests: Sequence[ForwardRow], masks: Mapping[int, NDArray[np.int32]], vocab_size: int
) -> list[LogitsChunk]:
    """The chunks with masks for some requests, by index. ValueError if a mask does not fit."""
    lines: list[int] = []  # of each of the S outputs
    num_lines = 0
    for at, part in enumerate(requests):
        num_chosen, mask = part.num_logits - part.num_given, masks.get(at)
        lines += [-1] * part.num_given
        if mask is None:
            lines += [-1] * num_chosen
            continue
        expected = (num_chosen, -(-vocab_size // 32))
        if mask.shape != expected or mask.dtype != np.int32:
            raise ValueError(f"the mask is {mask.dtype} {mask.shape}, expected int32 {expected}")
        lines += range(num_lines, num_lines + num_chosen)
        num_lines += num_chosen
    joined, of_outputs = np.concatenate([masks[at] for at in sorted(masks)]), np.array(lines, np.int32)
    found = []
    for chunk in chunks:
        own = of_outputs[chunk.span]
        sampling = chunk.sampling._replace(masks=joined, mask_line=own if chunk.chosen is None else own[chunk.chosen])
        found.append(chunk._replace(sampling=sampling))
    return found
