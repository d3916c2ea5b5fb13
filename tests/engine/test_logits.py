"""Adjusted logits equal a slow twin in plain Python and transformers' processors, and do not depend on the batch."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from engine.cpu.cpu_sampling import load_cpu_sampling
from engine.masks import allowed_words, can_choose
from engine.sampling.logprobs import find_logprobs
from engine.sampling.sample import adjust_logits_
from tests.support.combinations import examples
from tests.support.sampling_twins import Asked, build_batch, build_mask, sample_batch, threads
from tests.support.threads import one_thread
from wire.sampling import SamplingParams

__all__ = ["one_thread"]  # a fixture


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def asked(tokens: list[int], num_prompt: int, words: Any = None, num_drafts: int = 0, **sampling: Any) -> Asked:
    return Asked(SamplingParams(**sampling), tokens, num_prompt, num_drafts, words)


def adjusted(logits: Tensor, *rows: Asked) -> Tensor:
    logits = logits.clone()
    adjust_logits_(logits, build_batch(rows, logits.shape[1]))
    return logits


def is_allowed(words: Any, token: int) -> bool:
    return bool(int(words[token // 32]) >> token % 32 & 1)


def adjust_slowly(row: list[float], asked: Asked) -> list[float]:
    """Token by token, following the docstring of `adjust_logits_`."""
    sampling = asked.sampling
    answer = list(asked.tokens)[asked.num_prompt :]
    result = []
    for token, logit in enumerate(row):
        if token in asked.tokens:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        count = answer.count(token)
        logit -= sampling.frequency_penalty * count + (sampling.presence_penalty if count else 0)
        logit += sum(bias for biased, bias in sampling.logit_bias if biased == token)
        result.append(logit if asked.words is None or is_allowed(asked.words, token) else -math.inf)
    return result


@st.composite
def rows_for(draw: st.DrawFn, vocabulary: int) -> Asked:
    token = st.integers(0, vocabulary - 1)
    tokens = draw(st.lists(token, max_size=30))
    num_prompt = draw(st.integers(0, len(tokens)))
    penalty = st.one_of(st.just(0.0), st.floats(-2, 2))
    allowed = draw(st.one_of(st.none(), st.sets(token, min_size=1)))
    return Asked(
        SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            frequency_penalty=draw(penalty),
            presence_penalty=draw(penalty),
            repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.5, 2))),
            logit_bias=tuple(draw(st.dictionaries(token, st.floats(-100, 100, width=32), max_size=5)).items()),
        ),
        tokens,
        num_prompt,
        draw(st.integers(0, len(tokens) - num_prompt)),
        None if allowed is None else build_mask(allowed, vocabulary),
    )


@given(data=st.data(), vocabulary=st.sampled_from([1, 5, 31, 32, 33, 64, 200, 300]), seed=st.integers(0, 1000))
@settings(max_examples=examples(100))
def test_slow_equals_plain_python_whatever_is_beside_it(data: st.DataObject, vocabulary: int, seed: int) -> None:
    rows = data.draw(st.lists(rows_for(vocabulary), min_size=1, max_size=4))
    logits = random_logits(seed, len(rows), vocabulary)
    together = adjusted(logits, *rows)
    tokens = sample_batch(logits, build_batch(rows, vocabulary))
    for at, row in enumerate(rows):
        assert torch.equal(together[at], adjusted(logits[at : at + 1], row)[0])
        slow = torch.tensor(adjust_slowly(logits[at].tolist(), row))
        torch.testing.assert_close(together[at], slow, rtol=1e-5, atol=1e-5)
        assert tokens[at] == sample_batch(logits[at : at + 1], build_batch([row], vocabulary))[0]


@given(data=st.data(), seed=st.integers(0, 1000), num_threads=st.sampled_from([1, 3]))
@settings(max_examples=examples(80))
def test_the_kernel_adjusts_to_the_same_bits(data: st.DataObject, seed: int, num_threads: int) -> None:
    kernel = load_cpu_sampling()
    if kernel is None:
        pytest.skip("no compiler")
    vocabulary = data.draw(st.sampled_from([256, 512, 8192]))
    rows = data.draw(st.lists(rows_for(vocabulary), min_size=1, max_size=4))
    logits = random_logits(seed, len(rows), vocabulary)
    expected = adjusted(logits, *rows)
    for row, asked in zip(expected, rows, strict=True):
        if not asked.sampling.is_greedy:
            row.sub_(row.max()).div_(asked.sampling.temperature).clamp_(min=torch.finfo(torch.float32).min)
    with threads(num_threads):
        kernel.sample(logits, build_batch(rows, vocabulary))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("penalty", [0.3, 1.0, 1.7])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    logits, tokens = random_logits(2, 1, 500), [3, 3, 499, 0, 71, 3]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    assert torch.equal(adjusted(logits, asked(tokens, 4, repetition_penalty=penalty)), expected)


# --- what cannot be chosen


def test_the_mask_wins_over_forbidden_tokens() -> None:
    def left(mask: Any, forbidden: set[int]) -> set[int]:
        words = allowed_words(mask, forbidden, 40)
        return set(range(40)) if words is None else {token for token in range(40) if is_allowed(words, token)}

    mask = build_mask({3, 35}, 40)
    assert left(mask, {35, 7}) == {3} and (mask == build_mask({3, 35}, 40)).all()
    assert left(build_mask({35}, 40), {35, 7}) == {35}, "a grammar that must end here ends"
    assert left(None, {35, 7}) == set(range(40)) - {35, 7}
    assert left(None, {35, 33, 34, 77}) == set(range(40)) - {35, 34, 33}
    assert left(None, set(range(40))) == set(range(40)), "min_tokens cannot forbid everything"
    assert allowed_words(None, set(), 40) is None
    assert allowed_words(None, {40}, 40) is None


def test_masks_of_xgrammar_are_read_as_they_are() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    bitmask = xgrammar.allocate_token_bitmask(2, 100)
    bitmask[0] = torch.from_numpy(build_mask({0, 31, 32, 99}, 100))
    logits = random_logits(4, 1, 100)
    expected = logits.clone()
    xgrammar.apply_token_bitmask_inplace(expected, bitmask[:1])
    assert torch.equal(adjusted(logits, asked([1], 1, allowed_words(bitmask[0], (), 100))), expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (build_mask(set(), 40), "allows no token"),
        (build_mask({1}, 100), "shape"),
        (build_mask({1}, 40).astype(np.int64), "int64"),
    ],
)
def test_a_bad_mask_is_named(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allowed_words(mask, (), 40)


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64])
def test_can_choose_looks_at_tokens_that_exist(vocabulary: int) -> None:
    assert not can_choose(build_mask(set(), vocabulary), vocabulary)
    for token in {0, vocabulary // 2, vocabulary - 1}:
        assert can_choose(build_mask({token}, vocabulary), vocabulary)


# --- log-probabilities


@given(
    seed=st.integers(0, 1000),
    vocabulary=st.sampled_from([1, 2, 50, 4097, 9000]),
    rows=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([0, 1, 2, 5, 20, 60])), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),  # bfloat16: ties
)
@settings(max_examples=examples(80))
def test_log_probabilities_are_those_of_a_stable_sort(
    seed: int, vocabulary: int, rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocabulary, generator=generator).to(dtype).float()
    logprobs = torch.log_softmax(logits, -1)
    tokens, counts = [token % vocabulary for token, _ in rows], [count for _, count in rows]
    told = find_logprobs(logprobs, torch.tensor(tokens), counts).read()
    for row, token, count, one in zip(logprobs, tokens, counts, told, strict=True):
        order = sorted(range(vocabulary), key=lambda other: (-float(row[other]), other))[:count]
        assert one.logprob == float(row[token])
        assert one.top_ids == tuple(order)
        assert one.top_logprobs == tuple(row[order].tolist())
