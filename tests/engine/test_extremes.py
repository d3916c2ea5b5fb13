"""For all accepted parameters and all logits: a step does not raise, and forbidden tokens are never chosen."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling.sample import NOT_A_NUMBER, adjust_logits_
from tests.support.combinations import examples
from tests.support.sampling_twins import (
    BROKEN,
    FLOAT32,
    HUGE,
    TINY,
    VALUES,
    Asked,
    build_batch,
    rows,
    rows_asked,
    sample_batch,
    sample_both,
)
from tests.support.threads import one_thread
from wire.sampling import SamplingParams

__all__ = ["one_thread"]  # a fixture


def check(logits: Tensor, asked: list[Asked]) -> None:
    vocabulary = logits.shape[1]
    batch = build_batch(asked, vocabulary)
    adjusted, first = logits.clone(), logits[:, 0].tolist()
    adjust_logits_(adjusted, batch)
    tokens = sample_batch(logits, batch).tolist()
    for row, (one, token) in enumerate(zip(asked, tokens, strict=True)):
        allowed = set(range(vocabulary))
        if one.words is not None:
            allowed = {token for token in allowed if int(one.words[token // 32]) >> token % 32 & 1}
        assert token in ({NOT_A_NUMBER} if math.isnan(first[row]) else allowed), (one, token)
        assert set((adjusted[row] > -math.inf).nonzero()[:, 0].tolist()) == allowed


@given(data=st.data(), vocabulary=st.sampled_from([1, 2, 33, 90]), is_broken=st.booleans())
@settings(max_examples=examples(75))
def test_no_request_and_no_model_makes_a_step_raise_or_gets_what_is_forbidden(
    data: st.DataObject, vocabulary: int, is_broken: bool
) -> None:
    asked = data.draw(st.lists(rows_asked(vocabulary), min_size=1, max_size=3))
    logits = torch.tensor([data.draw(rows(vocabulary, VALUES + BROKEN * is_broken)) for _ in asked])
    says_nothing = (logits <= -FLOAT32.max).all(-1)  # the kernel tells the lowest float from -inf, its twin does not
    logits[says_nothing] = -math.inf
    if not is_broken:
        logits[says_nothing, 0] = 0.0
    check(logits, asked)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a GPU gives inf or NaN
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("vocabulary", "number"), [(90, 20), (9000, 1), (90, 90)])
def test_a_broken_row_takes_any_filter_and_harms_no_other(vocabulary: int, broken: float, number: int) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(2))
    logits[0, ::7] = -math.inf
    broken_too = logits.clone()
    broken_too[1, :number] = broken
    filters: list[dict[str, Any]] = [
        {}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 70, "top_p": 0.9}, {"top_k": 70, "min_p": 0.1}, {"top_p": 1e-9},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.999, "min_p": 0.5}, {"temperature": 0.0},
    ]  # fmt: skip
    for at, params in enumerate(SamplingParams(**one) for one in filters):
        on_gpu = number == 20 and at % 2 == 0  # interpreted: half a second each
        tokens = sample_both(broken_too, [params] * 3, [0, 1, 2], on_gpu=on_gpu)
        assert int(tokens[1]) in ([NOT_A_NUMBER] if math.isnan(broken) else range(vocabulary))
        assert torch.equal(tokens[[0, 2]], sample_both(logits, [params] * 3, [0, 1, 2])[[0, 2]])


@given(temperature=st.floats(0, 1e-6, exclude_max=True), seed=st.integers(0, 100))
@example(temperature=TINY, seed=0)
@settings(max_examples=examples(30))
def test_next_to_no_temperature_is_none(temperature: float, seed: int) -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    params = SamplingParams(temperature, top_k=5, top_p=0.9, min_p=0.1, seed=seed)
    assert sample_both(logits, [params], [7]).item() == logits.argmax()


def test_the_least_temperature_that_is_one_still_tells_near_from_equal() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 7:9] = 1e-3
    drawn = {int(sample_both(logits, [SamplingParams(1e-6, seed=seed)], [0])) for seed in range(40)}
    assert drawn == {7, 8}


def test_a_penalty_beyond_float32_is_as_the_largest() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.0]])
    for penalty, order in ((1e-40, [0, 3, 2, 1]), (HUGE, [3, 0, 2, 1])):
        adjusted = logits.clone()
        adjust_logits_(adjusted, build_batch([Asked(SamplingParams(repetition_penalty=penalty), [0, 1, 2], 1)], 4))
        assert adjusted.isfinite().all()
        assert adjusted[0].sort(descending=True, stable=True).indices.tolist() == order
