"""Adjusted logits equal a slow twin in plain Python, transformers' processors, and nothing else of the batch."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from engine.choice import Choice
from engine.logits import adjust_logits_, can_choose
from engine.sampling import SamplingParams


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def build_choice(tokens: list[int], num_prompt: int, mask: Any = None, forbidden: Any = (), **sampling: Any) -> Choice:
    """For the token after all of `tokens`."""
    return Choice(
        SamplingParams(**sampling), len(tokens), tokens, num_prompt, forbidden=frozenset(forbidden), mask=mask
    )


def build_mask(allowed: set[int], vocabulary: int) -> Any:
    """Bits of tokens that do not exist are set: nobody may look at them."""
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    for token in allowed | set(range(vocabulary, 32 * len(words))):
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def adjusted(logits: Tensor, *choices: Choice) -> Tensor:
    logits = logits.clone()
    adjust_logits_(logits, choices)
    return logits


def is_allowed(mask: Any, token: int) -> bool:
    return bool(int(mask[token // 32]) >> token % 32 & 1)


def adjust_slowly(row: list[float], choice: Choice) -> list[float]:
    """Token by token, by the words of `adjust_logits_`."""
    sampling = choice.sampling
    seen = list(choice.tokens)[: choice.position]
    answer = seen[choice.num_prompt :]
    can_come = {token for token in range(len(row)) if choice.mask is None or is_allowed(choice.mask, token)}
    can_come = can_come - choice.forbidden or can_come
    result = []
    for token, logit in enumerate(row):
        if token in seen:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        count = answer.count(token)
        logit -= sampling.frequency_penalty * count + (sampling.presence_penalty if count else 0)
        logit += sum(bias for biased, bias in sampling.logit_bias if biased == token)
        result.append(logit if token in can_come else -math.inf)
    return result


@st.composite
def choices_for(draw: st.DrawFn, vocabulary: int) -> Choice:
    token = st.integers(0, vocabulary - 1)
    tokens = draw(st.lists(token, min_size=1, max_size=30))
    position = draw(st.integers(1, len(tokens)))
    penalty = st.one_of(st.just(0.0), st.floats(-2, 2))
    allowed = draw(st.one_of(st.none(), st.sets(token, min_size=1)))
    return Choice(
        SamplingParams(
            frequency_penalty=draw(penalty),
            presence_penalty=draw(penalty),
            repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.5, 2))),
            logit_bias=tuple(draw(st.lists(st.tuples(token, st.floats(-100, 100, width=32)), max_size=5))),
        ),
        position,
        tokens,
        draw(st.integers(0, position)),
        forbidden=frozenset(draw(st.sets(st.integers(0, vocabulary + 40), max_size=5))),
        mask=None if allowed is None else build_mask(allowed, vocabulary),
    )


@given(data=st.data(), vocabulary=st.sampled_from([1, 5, 31, 32, 33, 64, 200]), seed=st.integers(0, 1000))
@settings(max_examples=150)
def test_fast_equals_slow_whatever_else_is_in_the_batch(data: st.DataObject, vocabulary: int, seed: int) -> None:
    choices = data.draw(st.lists(choices_for(vocabulary), min_size=1, max_size=4))
    logits = random_logits(seed, len(choices), vocabulary)
    together = adjusted(logits, *choices)
    for row, choice in enumerate(choices):
        assert torch.equal(together[row], adjusted(logits[row : row + 1], choice)[0])
        slow = torch.tensor(adjust_slowly(logits[row].tolist(), choice))
        torch.testing.assert_close(together[row], slow, rtol=1e-5, atol=1e-5)


def test_nothing_asked_for_changes_nothing() -> None:
    logits = random_logits(1, 1, 100)
    assert torch.equal(adjusted(logits, build_choice([1, 2, 3], 1)), logits)
    given_choice = replace(
        build_choice([1, 2, 3], 1, mask=build_mask({1}, 100), logit_bias=((3, 5.0),)), position=2, is_given=True
    )
    assert torch.equal(adjusted(logits, given_choice), logits)


@pytest.mark.parametrize("penalty", [0.3, 1.0, 1.7])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    logits, tokens = random_logits(2, 1, 500), [3, 3, 499, 0, 71, 3]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    assert torch.equal(adjusted(logits, build_choice(tokens, 4, repetition_penalty=penalty)), expected)


def test_logit_bias_equals_transformers() -> None:
    logits, biases = random_logits(3, 1, 500), ((0, 1.5), (7, -100.0), (499, 0.25))
    expected = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases])(
        torch.tensor([[1]]), logits.clone()
    )
    assert torch.equal(adjusted(logits, build_choice([1], 1, logit_bias=biases)), expected)


def test_penalties_see_neither_the_prompt_nor_what_comes_later() -> None:
    """OpenAI's penalties count the answer only; drafts after the row's position are no part of it yet."""
    choice = Choice(SamplingParams(frequency_penalty=1.0, presence_penalty=0.5), 5, [1, 2, 3, 3, 4, 5, 5], 2)
    assert adjusted(torch.zeros(1, 7), choice).tolist() == [[0, 0, 0, -2.5, -1.5, 0, 0]]
    choice = Choice(SamplingParams(repetition_penalty=2.0), 5, [1, 2, 3, 3, 4, 5, 5], 2)
    assert adjusted(torch.full((1, 7), -1.0), choice).tolist() == [[-1, -2, -2, -2, -2, -1, -1]]


def test_the_order_is_repetition_then_counts_then_bias() -> None:
    choice = build_choice(
        [0], 0, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=2.0, logit_bias=((0, 10.0),)
    )
    assert adjusted(torch.tensor([[4.0, 0.0]]), choice).tolist() == [[4 / 2 - 1 - 2 + 10, 0.0]]


# --- what cannot be chosen


def test_the_mask_wins_over_forbidden_tokens() -> None:
    logits = torch.zeros(1, 40)

    def left(mask: Any, forbidden: set[int]) -> set[int]:
        row = adjusted(logits, build_choice([1], 1, mask=mask, forbidden=forbidden))[0]
        return set((row > -math.inf).nonzero().view(-1).tolist())

    assert left(build_mask({3, 35}, 40), {35, 7}) == {3}
    assert left(build_mask({35}, 40), {35, 7}) == {35}, "a grammar that must end here ends"
    assert left(None, {35, 7}) == set(range(40)) - {35, 7}
    assert left(None, set(range(40))) == set(range(40)), "min_tokens cannot forbid everything"


def test_masks_of_xgrammar_are_read_as_they_are() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    bitmask = xgrammar.allocate_token_bitmask(2, 100)
    bitmask[0] = torch.from_numpy(build_mask({0, 31, 32, 99}, 100))
    logits = random_logits(4, 1, 100)
    expected = logits.clone()
    xgrammar.apply_token_bitmask_inplace(expected, bitmask[:1])
    assert torch.equal(adjusted(logits, build_choice([1], 1, mask=bitmask[0])), expected)


def test_inputs_are_not_modified() -> None:
    mask = build_mask({3, 35}, 40)
    before = mask.copy()
    adjusted(torch.zeros(1, 40), build_choice([1], 1, mask=mask, forbidden={3}))
    assert (mask == before).all()


BAD_CHOICES = [
    (build_choice([1], 1, mask=build_mask(set(), 40)), "allows no token"),
    (build_choice([1], 1, mask=build_mask({1}, 100)), "shape"),
    (build_choice([1], 1, mask=build_mask({1}, 40).astype(np.int64)), "int64"),
    (build_choice([1], 1, logit_bias=((40, 1.0),)), "token 40"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_CHOICES, ids=[message for _, message in BAD_CHOICES])
def test_a_bad_choice_is_named_before_anything_changes(bad: Choice, message: str) -> None:
    logits = random_logits(5, 2, 40)
    before = logits.clone()
    with pytest.raises(ValueError, match=message):
        adjust_logits_(logits, [build_choice([1], 0, presence_penalty=1.0), bad])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64])
def test_can_choose_looks_at_tokens_that_exist(vocabulary: int) -> None:
    assert not can_choose(build_mask(set(), vocabulary), vocabulary)
    for token in {0, vocabulary // 2, vocabulary - 1}:
        assert can_choose(build_mask({token}, vocabulary), vocabulary)
