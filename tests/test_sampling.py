"""Sampling: the noise is what it claims to be, rows are independent, filters equal their slow twins."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.blocks import Blocks, build_blocks
from engine.filters import Filter, find_floors, keep_tokens_slowly
from engine.noise import CEILING_GAP, build_keys, gumbel_noise, hash_ids, noise_ceilings
from engine.sampling import SamplingParams, pick, pick_slowly, sample, scale_logits

CPU = torch.device("cpu")


def hash_words(ids: Tensor, seed: int, position: int) -> Tensor:
    """[n] -> [n] int64 in [0, 2^32)"""
    return hash_ids(ids, build_keys([seed], [position], CPU)[0]).to(torch.int64) & (2**32 - 1)


def scaled_blocks(logits: Tensor, temperatures: list[float]) -> Blocks:
    return build_blocks(scale_logits(logits, torch.tensor(temperatures)))


def kept_ids(blocks: Blocks, filters: list[Filter], vocabulary: int) -> list[list[int]]:
    """The ids that the floors keep, by the words of `Floors`."""
    floors = find_floors(blocks, filters)
    if floors is None:
        return [list(range(vocabulary))] * len(filters)
    kept = []
    for row, lowest, num_on in zip(blocks.values, floors.lowest, floors.num_on, strict=True):
        values = row.flatten()[:vocabulary]
        is_low = (values == lowest) & ((values == lowest).cumsum(0) <= num_on)
        kept.append(((values > lowest) | is_low).nonzero().view(-1).tolist())
    return kept


def random_logits(seed: int, *shape: int, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def chi_square_sigmas(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations the chi-square statistic lies from its mean. Cells expected under 5 are pooled."""
    is_rare = expected < 5
    if is_rare.any():
        counts = torch.cat([counts[~is_rare], counts[is_rare].sum().view(1)])
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum().view(1)])
        counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    statistic = float(((counts.double() - expected.double()) ** 2 / expected.double()).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


# --- the noise

GOLDEN_HASHES = [
    [210217936, 709013277, 1777805730, 2305261399],
    [3897193352, 922330020, 1258288468, 3097159824],
    [1337374101, 3458798008, 2241138213, 446382720],
]
GOLDEN_TOKENS = [337, 388, 228, 876, 724, 625, 961, 608]


def test_hash_never_changes() -> None:
    ids = torch.tensor([0, 1, 2, 128255])
    assert hash_words(ids, 0, 0).tolist() == GOLDEN_HASHES[0]
    assert hash_words(ids, 0, 1).tolist() == GOLDEN_HASHES[1]
    assert hash_words(ids, 2**64 - 1, 1000).tolist() == GOLDEN_HASHES[2]


def test_tokens_never_change() -> None:
    logits = random_logits(0, 8, 1000)
    params = [SamplingParams(seed=row, temperature=0.8, top_p=0.95) for row in range(8)]
    assert sample(logits, params, range(8)).tolist() == GOLDEN_TOKENS


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
@settings(max_examples=100)
def test_hash_equals_unbounded_integers(ids: list[int], seed: int, position: int) -> None:
    expected = [hash_in_plain_python(token, seed, position) for token in ids]
    assert hash_words(torch.tensor(ids), seed, position).tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63])
@pytest.mark.parametrize("shift", [0, 12, 24])
def test_hash_is_uniform_in_every_byte(seed: int, shift: int) -> None:
    words = hash_words(torch.arange(200_000), seed, 17)
    counts = torch.bincount((words >> shift) & 0xFF, minlength=256)
    assert abs(chi_square_sigmas(counts, torch.full((256,), 200_000 / 256))) < 5


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (2**32, 0), (2**63, 0), (0, 1 << 20)])
def test_seeds_and_positions_are_independent(other: tuple[int, int]) -> None:
    ids = torch.arange(200_000)
    pairs = (hash_words(ids, 0, 0) >> 28) * 16 + (hash_words(ids, *other) >> 28)
    counts = torch.bincount(pairs, minlength=256)
    assert abs(chi_square_sigmas(counts, torch.full((256,), 200_000 / 256))) < 5


def test_one_token_over_positions_is_uniform_and_uncorrelated() -> None:
    words = torch.cat([hash_words(torch.tensor([5]), 3, position) for position in range(4000)])
    uniform = words.double() / 2**32
    assert abs(chi_square_sigmas(torch.bincount(words >> 28, minlength=16), torch.full((16,), 250.0))) < 5
    assert abs(float(torch.corrcoef(torch.stack([uniform[1:], uniform[:-1]]))[0, 1])) < 5 / math.sqrt(4000)


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(torch.arange(400_000), build_keys([11], [3], CPU)).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.57722) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    edges = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)  # Gumbel's distribution is exp(-exp(-x))
    cells = torch.bucketize(torch.exp(-torch.exp(-noise)), edges)
    widths = torch.full((50,), 0.02)
    assert abs(chi_square_sigmas(torch.bincount(cells, minlength=50), widths * 400_000)) < 5


def test_ceilings_are_above_the_noise_by_no_more_than_the_gap() -> None:
    ids, keys = torch.arange(1 << 20), build_keys([11], [3], CPU)
    gaps = noise_ceilings(ids, keys).double() - gumbel_noise(ids, keys)
    assert gaps.min() > -1e-5
    assert gaps.max() < CEILING_GAP - 0.005


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
    """[V] -> [V] float64 probabilities by a loop that follows the words of `sample`'s docstring."""
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
    tokens = sample(logits.expand(num_draws, -1), [params] * num_draws, range(num_draws))
    expected = filtered_softmax(logits, params) * num_draws
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert not counts[expected == 0].any()
    assert abs(chi_square_sigmas(counts[expected > 0], expected[expected > 0])) < 5


@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 5.0]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 500, 5000]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    is_coarse=st.booleans(),
)
@settings(max_examples=150)
def test_fast_equals_slow(
    seed: int,
    vocabulary: int,
    spread: float,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    is_coarse: bool,
) -> None:
    logits = random_logits(seed, vocabulary, spread=spread)
    if is_coarse:  # many ties
        logits = logits.round()
        logits[::3] = -math.inf
        logits[0] = 0.0
    assert_fast_equals_slow(logits[None], [temperature], [Filter(top_k, top_p, min_p)], [seed])


def assert_fast_equals_slow(
    logits: Tensor, temperatures: list[float], filters: list[Filter], seeds: list[int], position: int = 9
) -> None:
    blocks = scaled_blocks(logits, temperatures)
    keys = build_keys(seeds, [position] * len(seeds), CPU)
    picked = pick(blocks, find_floors(blocks, filters), keys)
    kept = kept_ids(blocks, filters, logits.shape[1])
    for row, scaled in enumerate(scale_logits(logits, torch.tensor(temperatures))):
        expected = keep_tokens_slowly(scaled, filters[row])
        assert kept[row] == expected.tolist()
        assert picked[row] == pick_slowly(scaled, expected, keys[row])


@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([1, 3, 65, 700, 4095, 4096, 4100, 9000]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 10.0]),
    filters=st.lists(
        st.builds(
            Filter,
            st.sampled_from([0, 1, 20, 63, 64, 65, 4099, 20_000]),
            st.sampled_from([1e-6, 0.5, 0.9, 0.999, 1.0]),
            st.sampled_from([0.0, 0.05, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),  # bfloat16: ties, on floors too
)
@settings(max_examples=150)
def test_fast_equals_slow_for_many_rows(
    seed: int, vocabulary: int, spread: float, filters: list[Filter], dtype: torch.dtype
) -> None:
    logits = random_logits(seed, len(filters), vocabulary, spread=spread).to(dtype)
    temperatures = [0.6 + 0.2 * row for row in range(len(filters))]
    assert_fast_equals_slow(logits, temperatures, filters, [seed % 3 + row for row in range(len(filters))])


def test_fast_equals_slow_on_a_large_vocabulary() -> None:
    filters = [Filter(0, 0.9, 0), Filter(50, 0.9, 0), Filter(0, 0.9999, 0), Filter(0, 1, 0), Filter(3000, 0.99, 0.001)]
    logits = random_logits(5, len(filters), 128_256)
    for position in range(5):
        assert_fast_equals_slow(logits, [0.9] * len(filters), filters, [1] * len(filters), position)


def test_logits_of_a_broken_model_give_a_token_and_harm_no_other_row() -> None:
    logits = random_logits(6, 3, 5000)
    logits[1] = math.nan
    tokens = sample(logits, [SamplingParams(top_p=0.9)] * 3, [0, 1, 2])
    assert 0 <= int(tokens[1]) < 5000
    assert torch.equal(tokens[[0, 2]], sample(logits[[0, 2]], [SamplingParams(top_p=0.9)] * 2, [0, 2]))


# --- rows


def test_rows_do_not_depend_on_the_batch() -> None:
    logits = random_logits(2, 12, 500)
    params = [SamplingParams(0.0 if row % 4 == 0 else 1.0, 0.9, row, 0.01, seed=row % 3) for row in range(12)]
    positions = [7 * row for row in range(12)]
    together = sample(logits, params, positions).tolist()
    alone = [sample(logits[row : row + 1], [params[row]], [positions[row]]).item() for row in range(12)]
    reordered = sample(logits.flip(0), params[::-1], positions[::-1]).tolist()[::-1]
    assert together == alone == reordered
    assert sample(logits, params, positions).tolist() == together


def test_seed_and_position_change_the_token() -> None:
    logits = torch.zeros(1, 10_000)
    tokens = {int(sample(logits, [SamplingParams(seed=seed)], [p])) for seed in (0, 1, 2**33) for p in range(10)}
    assert len(tokens) > 25


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(logits, [SamplingParams(0.0)] * 2, [0, 1]).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_does_not_modify(dtype: torch.dtype) -> None:
    logits = random_logits(3, 3, 100).to(dtype)
    before = logits.clone()
    params = [SamplingParams(), SamplingParams(0.0), SamplingParams(top_k=1)]
    tokens = sample(logits, params, [0, 1, 2])
    assert tokens.dtype is torch.int64 and tokens[1:].tolist() == logits.argmax(-1)[1:].tolist()
    assert torch.equal(logits, before)


def test_masked_tokens_never_come() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, 31] = -5.0
    for params in (SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3), SamplingParams(min_p=0.1)):
        assert sample(logits, [params], [4]).item() == 31


def test_extreme_temperatures_stay_finite() -> None:
    logits = torch.tensor([[300.0, -300.0, 299.0]])
    assert sample(logits, [SamplingParams(1e-30)], [0]).item() == 0
    assert sample(logits, [SamplingParams(1e30)], [0]).item() in (0, 1, 2)


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 10), [], []).shape == (0,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        *(("top_p", value) for value in (0.0, 1.1, math.nan)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        ("top_k", -1),
        *(("frequency_penalty", value) for value in (math.nan, math.inf)),
        *(("presence_penalty", value) for value in (math.nan, -math.inf)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("logit_bias", value) for value in (((-1, 0.0),), ((3, math.inf),), ((0, 1.0), (1, math.nan)))),
        *(("seed", value) for value in (-1, 2**64)),
    ],
)
def test_bad_parameters_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_row_counts_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(2, 10), [SamplingParams()], [0])
