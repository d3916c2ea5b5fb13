"""Sampling: the noise has its distribution, rows are independent, the kernel equals its slow twin."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.cpu.build import BuildError, find_compiler
from engine.cpu.cpu_sampling import load_cpu_sampling
from engine.cpu.cpu_sampling import sample_on_cpu as sample
from engine.sampling.fields import PARAMS
from engine.sampling.noise import build_keys, gumbel_noise, hash_ids
from tests.support.batches import build_sampling_batch
from tests.support.combinations import examples
from tests.support.instruction_sets import WIDTHS, built_for
from tests.support.sampling_twins import build_mask, chi_square_sigmas, sample_both
from tests.support.threads import one_thread
from wire.sampling import SamplingParams

__all__ = ["one_thread"]  # a fixture

CPU = torch.device("cpu")


def one_key(seed: int, position: int) -> Tensor:
    """[2]"""
    return build_keys(np.array([seed], np.uint64), np.array([position]), CPU)[0]


def hash_words(ids: Tensor, seed: int, position: int) -> Tensor:
    """[n] -> [n] int64 in [0, 2^32)"""
    return hash_ids(ids, one_key(seed, position)).to(torch.int64) & (2**32 - 1)


def random_logits(seed: int, *shape: int, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


# --- the noise

GOLDEN_TOKENS = [337, 388, 228, 876, 724, 625, 961, 608]


def test_tokens_never_change() -> None:
    logits = random_logits(0, 8, 1000)
    params = [SamplingParams(seed=row, temperature=0.8, top_p=0.95) for row in range(8)]
    assert sample_both(logits, params, range(8)).tolist() == GOLDEN_TOKENS


def hash_in_plain_python(token: int, seed: int, position: int) -> int:
    def mix64(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    def mix32(word: int) -> int:
        word = (word ^ (word >> 16)) * 0x7FEB352D % 2**32
        word = (word ^ (word >> 15)) * 0x846CA68B % 2**32
        return word ^ (word >> 16)

    key = mix64(mix64(seed) ^ position)
    return mix32((mix32(token ^ (key >> 32)) + key) % 2**32)


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)
)
@settings(max_examples=examples(100))
def test_hash_equals_unbounded_integers(ids: list[int], seed: int, position: int) -> None:
    expected = [hash_in_plain_python(token, seed, position) for token in ids]
    assert hash_words(torch.tensor(ids), seed, position).tolist() == expected


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(torch.arange(400_000), one_key(11, 3)).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.57722) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    edges = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)  # Gumbel's distribution is exp(-exp(-x))
    cells = torch.bucketize(torch.exp(-torch.exp(-noise)), edges)
    widths = torch.full((50,), 0.02)
    assert abs(chi_square_sigmas(torch.bincount(cells, minlength=50), widths * 400_000)) < 5


# --- the distribution

FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
]


def filtered_softmax(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] -> [V] float64 probabilities, by a loop that follows `sample`'s docstring."""
    probabilities = torch.softmax(logits.double() / params.temperature, 0)
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(float(probabilities[token]) for token in order)
    kept: list[int] = []
    held = 0.0
    for token in order:
        if kept and held >= params.top_p * total:
            break
        kept.append(token)
        held += float(probabilities[token])
    kept = [token for token in kept if probabilities[token] >= params.min_p * probabilities[order[0]]]
    filtered = torch.zeros_like(probabilities)
    filtered[kept] = probabilities[kept]
    return filtered / filtered.sum()


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_follow_the_filtered_softmax(params: SamplingParams) -> None:
    num_draws, vocabulary = 3000, 40
    logits = random_logits(1, vocabulary, spread=1.5)
    tokens = sample_both(logits.expand(num_draws, -1), [params] * num_draws, range(num_draws))
    expected = filtered_softmax(logits, params) * num_draws
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert not counts[expected == 0].any()
    assert abs(chi_square_sigmas(counts[expected > 0], expected[expected > 0])) < 5


params_of_all_kinds = st.builds(
    SamplingParams, temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
    top_p=st.sampled_from([1e-6, 0.3, 0.5, 0.9, 0.999, 1.0]), top_k=st.sampled_from([0, 1, 7, 64, 500, 5000]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, math.exp(-1), 1.0]), seed=st.integers(0, 2**64 - 1),
)  # fmt: skip


@st.composite
def some_logits(draw: st.DrawFn, vocabulary: int) -> Tensor:
    """[V]: spread, nearly or exactly equal, with ties, with -inf."""
    logits = random_logits(
        draw(st.integers(0, 2**32)), vocabulary, spread=draw(st.sampled_from([0.0, 1e-6, 0.3, 3, 30]))
    )
    if draw(st.booleans()):
        logits = logits.to(torch.bfloat16).float()
    if draw(st.booleans()):
        logits = logits.round()
    if draw(st.booleans()):
        logits[:: draw(st.integers(1, 3))] = -math.inf
        logits[draw(st.integers(0, vocabulary - 1))] = 0.0
    return logits


@pytest.fixture(scope="module", params=WIDTHS, ids=str)
def width(request: pytest.FixtureRequest) -> Iterator[None]:
    with built_for(request.param):
        yield


@pytest.mark.usefixtures("width")
@given(data=st.data(), num_threads=st.sampled_from([1, 2, 3]))
@settings(max_examples=examples(50))
def test_fast_equals_slow(data: st.DataObject, num_threads: int) -> None:
    vocabulary = data.draw(st.sampled_from([1, 2, 3, 8, 31, 65, 255, 256, 257, 700]))
    logits, params = data.draw(some_logits(vocabulary)), data.draw(params_of_all_kinds)
    sample_both(logits.expand(200, -1), [params] * 200, range(200), num_threads=num_threads)


@pytest.mark.usefixtures("width")
@given(data=st.data(), vocabulary=st.sampled_from([4100, 9000, 20_000]), num_threads=st.sampled_from([1, 2, 3]))
@settings(max_examples=25)
def test_fast_equals_slow_on_larger_vocabularies(data: st.DataObject, vocabulary: int, num_threads: int) -> None:
    params = data.draw(st.lists(params_of_all_kinds, min_size=1, max_size=5))
    logits = torch.stack([data.draw(some_logits(vocabulary)) for _ in params])
    sample_both(logits, params, [9] * len(params), num_threads=num_threads)


INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a GPU gives inf or NaN


@INTERPRETED
def test_tokens_at_the_edge_of_a_filter() -> None:
    keys = build_keys(np.full(30_000, 1, np.uint64), np.arange(30_000), CPU)
    positions = gumbel_noise(torch.tensor([3499, 3500]), keys[:, None]).argmax(0).tolist()  # each token's largest noise
    assert sample_both(torch.zeros(2, 5000), [SamplingParams(seed=1)] * 2, positions).tolist() == [3499, 3500]
    for top_k in (0, 10):  # all equal tokens are kept
        params = [SamplingParams(top_p=0.7, top_k=top_k, seed=1)] * 2
        tokens = sample_both(torch.zeros(2, 5000), params, positions, on_gpu=True).tolist()
        assert tokens[0] == 3499 and tokens[1] < 3500


@INTERPRETED
def test_of_equal_scores_the_first_token_wins() -> None:
    noise = gumbel_noise(torch.arange(20_000), one_key(3, 5))
    values, ids = noise.sort(stable=True)
    pairs = [sorted(ids[at : at + 2].tolist()) for at in (values[1:] == values[:-1]).nonzero()[:2, 0]]
    masks, lines = np.stack([build_mask(set(pair), 20_000) for pair in pairs]), np.arange(len(pairs), dtype=np.int32)
    params = [SamplingParams(seed=3)] * len(pairs)
    logits = torch.zeros(len(pairs), 20_000)
    tokens = sample_both(logits, params, [5] * len(pairs), on_gpu=True, masks=masks, mask_line=lines)
    assert tokens.tolist() == [first for first, _ in pairs]


def test_no_rows() -> None:
    assert sample_both(torch.zeros(0, 10), [], [], on_gpu=True).shape == (0,)


# --- mismatched arguments


def wrong(**parts: Any) -> tuple[dict[str, Any], str]:
    return parts, next(iter(parts))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        wrong(params=np.zeros(3, PARAMS)),
        wrong(params=np.zeros(2)),
        wrong(params=np.zeros(4, PARAMS)[::2]),
        wrong(positions=np.zeros(2)),
        ({"counts": torch.zeros(1, 39, dtype=torch.int32), "counts_line": np.zeros(2, np.int32)}, "counts are"),
        ({"counts": torch.zeros(1, 40, dtype=torch.int32), "counts_line": np.ones(2, np.int32)}, "counts_line holds 1"),
        ({"counts": torch.zeros(1, 40, dtype=torch.int32)}, "counts_line is missing"),
        ({"masks": np.zeros((1, 1), np.int32), "mask_line": np.zeros(2, np.int32)}, "masks"),
        ({"masks": np.zeros((1, 2), np.int32), "mask_line": np.array([0, -2], np.int32)}, "mask_line holds -2"),
        ({"masks": np.zeros((1, 2), np.int32), "mask_line": np.array([-1, 0], np.int32)}, r"rows \[1\] allow no token"),
        *(
            ({f"{name}_starts": np.array(starts, np.int32), f"{name}_ids": np.array(ids, np.int32), **more}, message)
            for name, more in (("extra", {}), ("bias", {"bias_values": np.zeros(2, np.float32)}))
            for starts, ids, message in (
                ([0, 1, 2], [0, 40], f"{name}_ids holds 40"),
                ([0, 1, 2], [-1, 0], f"{name}_ids holds -1"),
                ([0, 3, 2], [0, 1], f"{name}_starts"),
                ([0, 1, 1], [0, 1], f"{name}_starts"),
                ([1, 1, 2], [0, 1], f"{name}_starts"),
                ([0, 2], [0, 1], f"{name}_starts"),
            )
        ),
    ],
)
def test_what_does_not_fit_is_named(parts: dict[str, Any], message: str) -> None:
    batch = build_sampling_batch([SamplingParams(0.0)] * 2, [0, 1])._replace(**parts)
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(2, 40), batch)


@pytest.mark.parametrize("logits", [torch.zeros(2, 40).double(), torch.zeros(40, 2).T, torch.zeros(40)])
def test_other_logits_are_refused(logits: Tensor) -> None:
    with pytest.raises(ValueError, match="logits are"):
        sample(logits, build_sampling_batch([SamplingParams(0.0)] * 2, [0, 1]))


def test_the_kernel_is_there_where_a_compiler_is() -> None:
    try:
        find_compiler()
    except BuildError:
        pytest.skip("no compiler")
    assert load_cpu_sampling() is not None


def test_without_a_compiler_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = random_logits(0, 8, 1000), build_sampling_batch([SamplingParams()] * 8, range(8))
    expected = sample(logits.clone(), batch)
    load_cpu_sampling.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        assert load_cpu_sampling() is None
        assert torch.equal(sample(logits, batch), expected)
    finally:
        load_cpu_sampling.cache_clear()
