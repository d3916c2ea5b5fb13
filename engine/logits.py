"""Adjusting logits before a token is chosen: penalties, bias, forbidden tokens, grammar masks.

The order is fixed: repetition penalty, frequency and presence penalty, bias, then forbidden tokens and the mask. Each
row is adjusted by its own choice alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.choice import Choice, TokenMask
from engine.sampling import SamplingParams


def adjust_logits_(logits: Tensor, choices: Sequence[Choice]) -> None:
    """[S, V] float32, S choices: change the rows in place as their choices say; rows that are given stay as they are.

    - repetition_penalty r: the logits of tokens in prompt or answer are divided by r if positive, else multiplied by r;
    - frequency_penalty f, presence_penalty p: a token that the answer holds n > 0 times loses f n + p;
    - logit_bias is added;
    - forbidden tokens, and those that the mask leaves out, become -inf. When that would leave no token, the forbidden
      ones may come after all: min_tokens gives way to a grammar that has to end.

    ValueError names a bias beyond the vocabulary, or a mask of the wrong length or without any token. Nothing is
    changed then.
    """
    vocabulary = logits.shape[1]
    adjusted = [(row, choice) for row, choice in enumerate(choices) if not choice.is_given]
    allowed = [allowed_words(choice, vocabulary) for _row, choice in adjusted]
    for _row, choice in adjusted:
        _check_bias(choice.sampling, vocabulary)
    for (row, choice), words in zip(adjusted, allowed, strict=True):
        _penalise_(logits[row], choice)
        _add_bias_(logits[row], choice.sampling)
        if words is not None:
            logits[row].masked_fill_(~unpack_mask(words, vocabulary).to(logits.device), -torch.inf)


def can_choose(mask: TokenMask, vocabulary: int) -> bool:
    """Whether the mask allows any token below `vocabulary`. Without one its sequence cannot go on."""
    words = _to_words(mask, vocabulary)
    return bool(words[:-1].any()) or bool(words[-1] & _last_bits(vocabulary))


def allowed_words(choice: Choice, vocabulary: int) -> NDArray[np.int32] | None:
    """The tokens that a choice has, packed like a mask: [ceil(V / 32)]; None if all. Does not modify the mask.

    ValueError as in `adjust_logits_`.
    """
    forbidden = [token for token in choice.forbidden if token < vocabulary]
    if choice.mask is None and not forbidden:
        return None
    words = np.full(-(-vocabulary // 32), -1, np.int32) if choice.mask is None else _to_words(choice.mask, vocabulary)
    if not can_choose(words, vocabulary):
        raise ValueError("the grammar's mask allows no token")
    left = words.copy()
    bits = left.view(np.uint32)
    for token in forbidden:
        bits[token // 32] &= ~np.uint32(1 << token % 32)
    return left if can_choose(left, vocabulary) else words


def unpack_mask(words: NDArray[np.int32], vocabulary: int) -> Tensor:
    """[ceil(V / 32)] int32 -> [V] bool on the CPU."""
    bits = np.unpackbits(words.astype("<i4", copy=False).view(np.uint8), count=vocabulary, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def _to_words(mask: TokenMask, vocabulary: int) -> NDArray[np.int32]:
    words = mask.numpy() if isinstance(mask, Tensor) else mask
    if words.shape != (-(-vocabulary // 32),):
        raise ValueError(
            f"the mask has shape {words.shape}, expected {-(-vocabulary // 32)} words for {vocabulary} tokens"
        )
    return words


def _last_bits(vocabulary: int) -> int:
    """The bits of a mask's last word that are tokens, as an int32."""
    return (1 << (vocabulary - 1) % 32 + 1) - 1 - (1 << 32 if vocabulary % 32 == 0 else 0)


def _check_bias(sampling: SamplingParams, vocabulary: int) -> None:
    for token, _bias in sampling.logit_bias:
        if token >= vocabulary:
            raise ValueError(f"logit_bias names token {token}, the model has {vocabulary}")


def _penalise_(row: Tensor, choice: Choice) -> None:
    """[V] in place, for the tokens that the row has seen."""
    sampling = choice.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(choice.tokens[: choice.position], dtype=torch.int64, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        answer = torch.tensor(choice.tokens[choice.num_prompt : choice.position], dtype=torch.int64, device=row.device)
        ids, counts = answer.unique(return_counts=True)
        row[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _add_bias_(row: Tensor, sampling: SamplingParams) -> None:
    for token, bias in sampling.logit_bias:
        row[token] += bias
