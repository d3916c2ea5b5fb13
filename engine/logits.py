"""Adjusting logits before a token is chosen: penalties, bias, forbidden tokens, grammar masks.

The order is fixed: repetition penalty, frequency and presence penalty, bias, then forbidden tokens and the mask. Each
row is adjusted by its own choice alone. Whatever the parameters and the logits, no NaN comes of it and the mask wins.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.choice import Choice, TokenMask
from engine.history import History
from engine.sampling import SamplingParams, replace_infinite_

MOST = 1e30  # a repetition_penalty beyond it, or below 1 / MOST, counts as that: float32 holds both
# [256, 8] byte of a mask |-> what its 8 tokens' logits get added
_ADDENDS = torch.where(torch.arange(256)[:, None] >> torch.arange(8) & 1 == 1, 0.0, -torch.inf)


def adjust_logits_(logits: Tensor, choices: Sequence[Choice]) -> None:
    """[S, V] float32, S choices: change the rows in place as their choices say; rows that are given stay as they are.

    - repetition_penalty r: the logits of tokens in prompt or answer are divided by r if positive, else multiplied by r;
    - frequency_penalty f, presence_penalty p: a token that the answer holds n > 0 times loses f n + p;
    - logit_bias is added;
    - forbidden tokens, and those that the mask leaves out, become -inf. When that would leave no token, the forbidden
      ones may come after all: min_tokens gives way to a grammar that has to end.

    Of a row that is adjusted, the other logits are finite then: what is lower becomes the lowest number, what is higher
    the highest. So a token that may come always beats one that may not.

    ValueError names a bias beyond the vocabulary, a mask of the wrong length or without any token (`can_choose` tells
    beforehand), or a history that is not the row's. Nothing is changed then.
    """
    vocabulary = logits.shape[1]
    choosing = [(row, choice) for row, choice in enumerate(choices) if not choice.is_given]
    for _row, choice in choosing:
        _check_bias(choice.sampling, vocabulary)
        _check_history(choice)
    allowed = {row: words for row, choice in choosing if (words := allowed_words(choice, vocabulary)) is not None}
    for row, choice in choosing:
        _penalise_(logits[row], choice)
        _add_bias_(logits[row], choice.sampling)
        if row in allowed or choice.sampling.has_penalties or choice.sampling.logit_bias:
            replace_infinite_(logits[row])
    if allowed:
        _apply_masks_(logits, list(allowed), torch.from_numpy(np.stack(list(allowed.values()))))


def can_choose(mask: TokenMask, vocabulary: int) -> bool:
    """Whether the mask allows any token below `vocabulary`. Without one its sequence cannot go on."""
    words = _to_words(mask, vocabulary)
    return bool(words[:-1].any()) or bool(int(words[-1]) & (1 << (vocabulary - 1) % 32 + 1) - 1)


def allowed_words(choice: Choice, vocabulary: int) -> NDArray[np.int32] | None:
    """The tokens that a choice has, packed like a mask: [ceil(V / 32)]; None if all. Does not modify the mask.

    ValueError if its own mask has the wrong length or allows no token.
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


def _to_words(mask: TokenMask, vocabulary: int) -> NDArray[np.int32]:
    words: NDArray[np.int32] = mask.numpy() if isinstance(mask, Tensor) else mask
    if words.shape != (-(-vocabulary // 32),) or words.dtype != np.int32:
        expected = f"{-(-vocabulary // 32)} of int32 for {vocabulary} tokens"
        raise ValueError(f"the mask has shape {words.shape} of {words.dtype}, expected {expected}")
    return words


def _apply_masks_(logits: Tensor, rows: list[int], words: Tensor) -> None:
    """[S, V], k of its rows, all finite: -inf added to NaN or inf is NaN; [k, ceil(V / 32)] int32 on the CPU"""
    addends = _ADDENDS.to(logits.device)
    masks = words.view(torch.uint8).to(logits.device)  # [k, 4 ceil(V / 32)], token t in byte t // 8: little-endian
    for row, mask in zip(rows, masks, strict=True):
        logits[row] += functional.embedding(mask.to(torch.int32), addends).flatten()[: logits.shape[1]]


def _check_bias(sampling: SamplingParams, vocabulary: int) -> None:
    for token, _bias in sampling.logit_bias:
        if token >= vocabulary:
            raise ValueError(f"logit_bias names token {token}, the model has {vocabulary}")


def _check_history(choice: Choice) -> None:
    num_before = choice.position - len(choice.guesses)
    if choice.history is not None and choice.history.length != num_before:
        raise ValueError(f"the history counts {choice.history.length} tokens, the row has seen {num_before}")


def _penalise_(row: Tensor, choice: Choice) -> None:
    """[V] in place, for the tokens that the row has seen."""
    sampling = choice.sampling
    if not sampling.has_penalties:
        return
    history = _count_anew(choice) if choice.history is None else choice.history
    if sampling.repetition_penalty != 1:
        penalty = min(max(sampling.repetition_penalty, 1 / MOST), MOST)
        ids = _to_tensor(history.seen.ids_after(choice.guesses), row)
        values = row.index_select(0, ids)
        row.index_copy_(0, ids, torch.where(values > 0, values / penalty, values * penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        ids, counts = (_to_tensor(part, row) for part in history.answer.after(choice.guesses))
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        row.index_copy_(0, ids, row.index_select(0, ids) - penalties)


def _count_anew(choice: Choice) -> History:
    history = History(choice.sampling, choice.num_prompt)
    history.follow(choice.tokens[: choice.position - len(choice.guesses)])
    return history


def _add_bias_(row: Tensor, sampling: SamplingParams) -> None:
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        ids = torch.tensor(tokens, dtype=torch.int64, device=row.device)
        row.index_add_(0, ids, torch.tensor(biases, dtype=row.dtype, device=row.device))


def _to_tensor(values: NDArray[np.int64], row: Tensor) -> Tensor:
    return torch.from_numpy(values).to(row.device)
