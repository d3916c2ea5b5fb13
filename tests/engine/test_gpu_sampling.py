"""The GPU's sampling, interpreted: it chooses the slow twin's tokens for all parameters and logits.

A row of logits costs 10 to 50 ms here, so the slow twin first finds rows where a filter decides.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.cpu.sampling_checks import check_sampling
from engine.cuda import gpu_noise
from engine.cuda.gpu_logits import BLOCK, GROUP, INFINITY, adjust
from engine.cuda.gpu_sampling import choose_tokens
from engine.cuda.gpu_values import scale
from engine.cuda.sampling import sample, upload_batch
from engine.sampling import noise
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import SEEN_BIT
from engine.sampling.sample import adjust_logits_, sample_slowly
from tests.support.batches import build_sampling_batch
from tests.support.combinations import combination, examples
from tests.support.sampling_twins import BROKEN, VALUES, Asked, build_batch, build_mask, rows, rows_asked
from wire.sampling import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a GPU gives inf or NaN

CPU = torch.device("cpu")


def random_logits(seed: int, *shape: int, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def check(logits: Tensor, batch: SamplingBatch) -> list[int]:
    """[S, V] -> the tokens, which must be the slow twin's."""
    check_sampling(batch, logits)
    before = logits.clone()
    tokens = sample(logits, batch).tolist()
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "logits were modified"
    assert tokens == sample_slowly(before, batch).tolist()
    return [int(token) for token in tokens]


# --- the noise


@triton.jit  # type: ignore[untyped-decorator]
def _hash_and_noise(seeds, positions, ids, words, noises, size: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, size)
    own = tl.load(ids + at)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    tl.store(words + row * size + at, gpu_noise.hash_ids(own, seed, position))
    tl.store(noises + row * size + at, gpu_noise.gumbel_noise(own, seed, position))


def find_id(word: int, high: int, low: int) -> int:
    """The inverse of `noise.hash_ids`."""

    def unmix32(word: int) -> int:
        word = (word ^ word >> 16) * pow(0x846CA68B, -1, 2**32) % 2**32
        word = (word ^ word >> 15 ^ word >> 30) * pow(0x7FEB352D, -1, 2**32) % 2**32
        return word ^ word >> 16

    return unmix32((unmix32(word) - low) % 2**32) ^ high % 2**32


def test_noise_has_the_bits_of_the_slow_twin() -> None:
    seeds = np.array([0, 1, 2**32, 2**63, 2**64 - 1, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, 77, 2**31 - 1, 2**40, 0])
    keys = noise.build_keys(seeds, positions, CPU)[:, None]
    edges = [0, 1, 2**23, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    found = [find_id(word, *key) for word in edges for key in keys[:, 0].tolist()]
    ids = torch.tensor([*found, *range(4096 - len(found))]).to(torch.int32)
    words = torch.zeros(len(seeds), len(ids), dtype=torch.int32)
    noises = torch.zeros(len(seeds), len(ids))
    fields = torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions)
    _hash_and_noise[(len(seeds),)](*fields, ids, words, noises, size=len(ids))
    assert set(edges) <= set((words.long() & 2**32 - 1).flatten().tolist())
    assert torch.equal(words, noise.hash_ids(ids, keys))
    assert torch.equal(noises, noise.gumbel_noise(ids, keys))


# --- adjusted logits


@given(data=st.data(), vocabulary=st.sampled_from([2, 33, 90, 2100]))
@settings(max_examples=examples(60))
def test_logits_are_adjusted_to_the_same_values(data: st.DataObject, vocabulary: int) -> None:
    asked = data.draw(st.lists(rows_asked(vocabulary), min_size=1, max_size=3))
    logits = torch.tensor(data.draw(rows(90, VALUES + BROKEN))).repeat(len(asked), 24)[:, :vocabulary].contiguous()
    batch = build_batch(asked, vocabulary)
    grid = len(asked), triton.cdiv(vocabulary, BLOCK.value)
    found, maxima = torch.full_like(logits, 7.0), torch.zeros(len(asked), grid[1] * BLOCK.value // GROUP.value)
    adjust[grid](logits, found, upload_batch(batch, CPU).split(), maxima, vocabulary)
    adjust_logits_(logits, batch)
    padded = torch.full((len(asked), grid[1] * BLOCK.value), -math.inf)
    padded[:, :vocabulary] = logits
    assert torch.equal(maxima, padded.view(len(asked), -1, GROUP.value).amax(-1))
    for row, one in enumerate(asked):
        is_own = one.sampling.has_penalties or one.sampling.logit_bias or one.words is not None
        assert torch.equal(found[row], logits[row] if is_own else torch.full((vocabulary,), 7.0))


@triton.jit  # type: ignore[untyped-decorator]
def _scale(values, tops, temperatures, scaled, size: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = row * size + tl.arange(0, size)
    own = scale(tl.load(values + at), -INFINITY, tl.load(tops + row), tl.load(temperatures + row))
    tl.store(scaled + at, own)


def test_scaled_values_have_the_bits_of_the_slow_twin() -> None:
    logits, temperatures = random_logits(1, 8, 1024), torch.tensor([1e-6, 0.1, 0.6, 0.7, 1.0, 1.3, 7.0, 1e30])
    tops = logits.amax(-1)
    scaled = torch.zeros_like(logits)
    _scale[(8,)](logits, tops, temperatures, scaled, size=1024)
    assert torch.equal(scaled, (logits - tops[:, None]) / temperatures[:, None])


# --- tokens

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=2**64 - 1),
    SamplingParams(temperature=0.6, top_p=0.95),
    SamplingParams(temperature=2.0, top_k=1),
    SamplingParams(top_k=20),
    SamplingParams(top_k=20, top_p=0.8, seed=2**40),
    SamplingParams(top_k=5000, top_p=0.5),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((0, 4.0),)),
    SamplingParams(top_p=0.9, presence_penalty=1.0, logit_bias=((0, -3.0),)),
    SamplingParams(temperature=9e-7, top_k=3),
]


@pytest.mark.parametrize(
    ("vocabulary", "spread"), [(1, 3.0), combination(33, 3.0), combination(2048, 3.0), (4100, 3.0), (4100, 0.0)]
)
def test_one_batch_of_all_kinds(vocabulary: int, spread: float) -> None:
    seen = [token % vocabulary for token in (0, 0, 7, 30, 2047, 4099)]
    words = build_mask(set(range(0, vocabulary, 3)), vocabulary)
    asked = [Asked(params, seen, 2, at % 4, words if at % 2 else None) for at, params in enumerate(PARAMS)]
    check(random_logits(vocabulary, len(asked), vocabulary, spread=spread), build_batch(asked, vocabulary))


DECIDING = [
    *(replace(PARAMS[at], seed=9) for at in (2, 3, 4, 5, 7, 8)),
    SamplingParams(temperature=3.0, top_p=0.05),  # nearly every candidate is refused
    SamplingParams(temperature=3.0, top_k=2),
    SamplingParams(temperature=3.0, top_k=600, top_p=0.2),  # more than groups: no bound, and no room for members
]
TRIED = 60  # positions, of which at least one's noise makes the filter decide


@pytest.mark.parametrize("params", [*map(combination, DECIDING[:4]), *DECIDING[4:]], ids=str)
def test_where_a_filter_decides(params: SamplingParams) -> None:
    logits, positions = [], []
    for row in (random_logits(5, 4500, spread=2.0), random_logits(6, 4500, spread=2.0).round()):
        free, kept = (
            sample_slowly(row.repeat(TRIED, 1), build_sampling_batch([one] * TRIED, range(TRIED)))
            for one in (replace(params, top_k=0, top_p=1.0, min_p=0.0), params)
        )
        decided = (free != kept).nonzero()[:, 0]
        positions += decided[row[kept[decided]].argsort()][:1].tolist()
        logits.append(row)
    assert len(positions) == 2
    check(torch.stack(logits), build_sampling_batch([params] * 2, positions))


def test_of_equal_scores_in_blocks_looked_at_one_after_the_other_the_first_token_wins() -> None:
    seed, position, num_blocks = 5, 100, 10  # one in 200 positions has such tokens
    keys = noise.build_keys(np.array([seed], np.uint64), np.array([position]), CPU)
    noises = noise.gumbel_noise(torch.arange(num_blocks * BLOCK.value), keys[0])
    values, blocks = noises.view(num_blocks, -1).sort(stable=True, dim=0)
    ((rank, place),) = (values[1:] == values[:-1]).nonzero().tolist()
    equal = (blocks[rank : rank + 2, place] * BLOCK.value + place).tolist()
    logits = torch.full((1, len(noises)), -50.0)
    logits[0, noises.topk(3).indices] = torch.tensor([-3e-6, -2e-6, -1e-6])  # their scores are still the best
    logits[0, equal] = 0.0
    batch = build_sampling_batch([SamplingParams(top_p=0.3, seed=seed)], [position])
    assert check(logits, batch) == [min(equal)]


def test_a_mask_that_allows_no_token_gives_none() -> None:
    masks = np.stack([build_mask(set(), 40), build_mask({3, 39}, 40)])
    lines = np.array([0, 0, 1, -1], np.int32)
    params = [SamplingParams(0.0), SamplingParams(top_p=0.9, top_k=4), SamplingParams(), SamplingParams()]
    tokens = check(random_logits(3, 4, 40), build_sampling_batch(params, range(4), masks=masks, mask_line=lines))
    assert tokens[:2] == [-1, -1]
    assert tokens[2] in (3, 39)


# --- buffers of fixed capacity, and what the host may read


def test_what_is_beyond_the_lines_in_use_is_not_looked_at() -> None:
    vocabulary, capacity = 70, 5
    words = build_mask({1, 5, 69}, vocabulary)
    asked = [
        Asked(SamplingParams(repetition_penalty=2.0), [1, 2, 3], 1, 1),
        Asked(SamplingParams(top_k=4, logit_bias=((5, 9.0),)), [4], 0, 0, words),
        Asked(SamplingParams(0.0)),
    ]
    batch = build_batch(asked, vocabulary)
    fields = upload_batch(batch, CPU)

    def widen(values: Tensor, fill: float) -> Tensor:
        return torch.cat([values, values.new_full((capacity, *values.shape[1:]), fill)])

    parts = {
        name: widen(getattr(fields, name), fill)
        for name, fill in (
            ("counts", SEEN_BIT | 3), ("extra_ids", 2), ("bias_ids", 2), ("bias_values", math.nan), ("masks", 0),
        )
    }  # fmt: skip
    logits, out = random_logits(4, 3, vocabulary), torch.zeros(3, dtype=torch.int64)
    choose_tokens(logits, fields._replace(**parts), out)
    assert out.tolist() == sample_slowly(logits.clone(), batch).tolist()


def test_the_host_reads_no_value_of_the_device() -> None:
    asked = [Asked(SamplingParams(repetition_penalty=2.0), [1, 2, 3], 1, 2)]
    batch = build_batch(asked, 40)
    assert isinstance(batch.counts, Tensor)
    there = batch._replace(counts=batch.counts.to("meta"), extra_ids=torch.empty(2, dtype=torch.int32, device="meta"))
    check_sampling(there, torch.zeros(1, 40, device="meta"))
    for wrong in (torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(2, device="meta")):
        with pytest.raises(ValueError, match="extra_ids are"):
            check_sampling(there._replace(extra_ids=wrong), torch.zeros(1, 40, device="meta"))
    drafts = torch.tensor([2, 3], dtype=torch.int32)
    assert upload_batch(batch._replace(extra_ids=drafts), CPU).extra_ids is drafts
