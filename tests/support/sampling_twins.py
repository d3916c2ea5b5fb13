"""Batches of rows given as tokens, and calls of the kernel and its slow twin, which must agree."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine.cpu.cpu_sampling import sample_on_cpu as sample
from engine.cuda import sampling as gpu
from engine.masks import allowed_words
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import SEEN_BIT
from engine.sampling.sample import sample_slowly
from tests.support.batches import build_sampling_batch
from wire.sampling import SamplingParams


@dataclass(frozen=True)
class Asked:
    """One row: choose the token after `tokens`."""

    sampling: SamplingParams
    tokens: Sequence[int] = ()
    num_prompt: int = 0  # leading tokens that are the prompt
    num_drafts: int = 0  # trailing answer tokens that are not in the counts
    words: NDArray[np.int32] | None = None  # the mask

    def count(self, vocabulary: int) -> NDArray[np.int32]:
        num_counted = len(self.tokens) - self.num_drafts
        counts = np.zeros(vocabulary, np.int32)
        for token in self.tokens[self.num_prompt : num_counted]:
            counts[token] += 1
        counts[list(self.tokens[:num_counted])] |= SEEN_BIT
        return counts


def build_batch(rows: Sequence[Asked], vocabulary: int) -> SamplingBatch:
    """Rows with penalties have lines of counts, in reverse order; other parts exist only if a row needs them."""
    counted = [at for at, row in enumerate(rows) if row.sampling.has_penalties][::-1]
    masked = [at for at, row in enumerate(rows) if row.words is not None][::-1]
    batch = build_sampling_batch(
        [row.sampling for row in rows],
        [len(row.tokens) for row in rows],
        counts=torch.from_numpy(np.stack([rows[at].count(vocabulary) for at in counted])) if counted else None,
        counts_line=find_lines(counted, len(rows)),
        masks=np.stack([words for at in masked if (words := rows[at].words) is not None]) if masked else None,
        mask_line=find_lines(masked, len(rows)),
    )
    drafts = [row.tokens[len(row.tokens) - row.num_drafts :] for row in rows]
    if not any(drafts):
        return batch
    starts = np.cumsum([0, *map(len, drafts)], dtype=np.int32)
    return batch._replace(extra_starts=starts, extra_ids=np.array([one for some in drafts for one in some], np.int32))


def find_lines(rows: list[int], num_rows: int) -> NDArray[np.int32]:
    lines = np.full(num_rows, -1, np.int32)
    lines[rows] = np.arange(len(rows))
    return lines


def build_mask(allowed: set[int], vocabulary: int) -> NDArray[np.int32]:
    """Bits past the vocabulary are set: nothing may read them."""
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    for token in allowed | set(range(vocabulary, 32 * len(words))):
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def sample_both(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], num_threads: int = 1,
    on_gpu: bool = False, **parts: Any,
) -> Tensor:  # fmt: skip
    """[S, V] -> [S]; does not modify the logits. `parts`: counts and masks of a `SamplingBatch`."""
    return sample_batch(logits, build_sampling_batch(params, positions, **parts), num_threads, on_gpu)


def sample_batch(logits: Tensor, batch: SamplingBatch, num_threads: int = 1, on_gpu: bool = False) -> Tensor:
    """[S, V] -> [S]; does not modify the logits. on_gpu: by the GPU's kernels, interpreted, too."""
    with threads(num_threads):
        tokens = sample(logits.clone(memory_format=torch.contiguous_format), batch)
    expected = sample_slowly(logits.clone(memory_format=torch.contiguous_format), batch)
    assert tokens.tolist() == expected.tolist()
    if on_gpu:
        assert gpu.sample(logits, batch).tolist() == expected.tolist()
    return tokens


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets torch's number of threads, which the kernel uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


HUGE, TINY = sys.float_info.max, 5e-324


FLOAT32 = torch.finfo(torch.float32)


VALUES = (-math.inf, -FLOAT32.max, -1e30, -5.0, -0.0, 0.0, FLOAT32.tiny, 1.0, 1.0000001, 3.0, 88.0, 1e30, FLOAT32.max)
BROKEN = (math.nan, math.inf)  # no request can cause them


def beyond(low: float, *edges: float) -> st.SearchStrategy[float]:
    """Numbers from `low` up: all magnitudes and the edges."""
    powers = st.floats(-324, 308).map(lambda power: max(10.0**power, TINY))
    return st.one_of(st.sampled_from(edges), powers, powers.map(lambda value: max(-value, low)) if low < 0 else powers)


signed = beyond(-HUGE, HUGE, -HUGE, 2.0, -2.0, 100.0, -100.0)
unit = st.one_of(st.sampled_from([TINY, 1e-50, 1e-40, 1 - 2**-53, 1.0]), st.floats(TINY, 1))


def samplings(vocabulary: int) -> st.SearchStrategy[SamplingParams]:
    token = st.integers(0, vocabulary - 1)
    return st.builds(
        SamplingParams,
        temperature=beyond(0.0, 0.0, TINY, 1e-50, 1e-40, 9e-7, 1e-6, 1.0, 2.0, HUGE),
        top_p=unit,
        top_k=st.sampled_from([0, 1, 2, vocabulary - 1, vocabulary, 63, 64, 65, 2**31, 2**63]),
        min_p=st.one_of(st.just(0.0), unit),
        seed=st.sampled_from([0, 2**64 - 1]),
        frequency_penalty=st.just(0.0) | signed,
        presence_penalty=st.just(0.0) | signed,
        repetition_penalty=st.just(1.0) | beyond(TINY, TINY, 1e-50, 1e-40, 1e-30, 1.0, 2.0, 1e30, 1e38, HUGE),
        logit_bias=st.lists(st.tuples(token, signed), max_size=4).map(tuple),
    )


@st.composite
def rows(draw: st.DrawFn, vocabulary: int, values: Sequence[float]) -> list[float]:
    """[V]: drawn from a few values, or nearly all equal."""
    if draw(st.booleans()):
        return draw(st.lists(st.sampled_from(values), min_size=vocabulary, max_size=vocabulary))
    row = [draw(st.sampled_from(values))] * vocabulary
    for token in draw(st.lists(st.integers(0, vocabulary - 1), max_size=4)):
        row[token] = draw(st.sampled_from(values))
    return row


@st.composite
def rows_asked(draw: st.DrawFn, vocabulary: int) -> Asked:
    token = st.integers(0, vocabulary - 1)
    tokens = draw(st.lists(token, min_size=1, max_size=12))
    allowed = draw(st.one_of(st.none(), st.sets(token, min_size=1)))
    mask = None if allowed is None else build_mask(allowed, vocabulary)
    words = allowed_words(mask, draw(st.just(set[int]()) | st.sets(token, max_size=3)), vocabulary)
    num_prompt = draw(st.integers(0, len(tokens)))
    return Asked(draw(samplings(vocabulary)), tokens, num_prompt, draw(st.integers(0, len(tokens) - num_prompt)), words)


def chi_square_sigmas(counts: Tensor, expected: Tensor) -> float:
    """Distance of the chi-square statistic from its mean, in standard deviations. Pools cells expected under 5."""
    is_rare = expected < 5
    if is_rare.any():
        counts = torch.cat([counts[~is_rare], counts[is_rare].sum().view(1)])
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum().view(1)])
        counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    statistic = float(((counts.double() - expected.double()) ** 2 / expected.double()).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)
