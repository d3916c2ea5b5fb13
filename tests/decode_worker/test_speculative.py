"""Verification of drafts: accepted tokens are those of plain decoding and follow the softmax."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import count_right
from engine.sampling.sample import sample
from tests.support.batches import build_sampling_batch
from tests.support.sampling_twins import chi_square_sigmas
from wire.sampling import SamplingParams

VOCABULARY = 8
SEQUENCE_TOKENS = 4


def count_accepted(*pairs: tuple[Sequence[int], Sequence[int]]) -> list[int]:
    """`count_right` for the drafts of each sequence and the tokens chosen after them, one more than drafts."""
    width = max(len(drafts) for drafts, _ in pairs)

    def align(rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([[-1] * (width - len(row)) + list(row) for row in rows], dtype=torch.int64)

    drafts, chosen = align([drafts for drafts, _ in pairs]), align([chosen[:-1] for _, chosen in pairs])
    return count_right(drafts, chosen, torch.tensor([len(one) for one, _ in pairs])).tolist()


def target_logits(text: tuple[int, ...]) -> Tensor:
    """[V], a tiny model: the next token depends on the whole text."""
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(hash(text) % 2**31)) * 1.5


def draft_logits(text: tuple[int, ...]) -> Tensor:
    """[V] of a drafter that is often close and sometimes wrong."""
    return target_logits(text) + torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(len(text)))


def choose(logits: Tensor, params: SamplingParams, position: int) -> int:
    return int(sample(logits[None].clone(), build_sampling_batch([params], [position])))


def decode_plainly(params: SamplingParams) -> tuple[int, ...]:
    text: tuple[int, ...] = ()
    while len(text) < SEQUENCE_TOKENS:
        text += (choose(target_logits(text), params, len(text)),)
    return text


def decode_with_drafts(params: SamplingParams, num_drafts: int, is_shared_noise: bool) -> tuple[tuple[int, ...], int]:
    """The text, and the number of accepted drafts. A drafter without the noise drafts greedily."""
    text: tuple[int, ...] = ()
    num_accepted = 0
    drafting = params if is_shared_noise else SamplingParams(temperature=0)
    while len(text) < SEQUENCE_TOKENS:
        drafts: tuple[int, ...] = ()
        for _ in range(num_drafts):
            drafts += (choose(draft_logits(text + drafts), drafting, len(text) + len(drafts)),)
        chosen = [choose(target_logits(text + drafts[:i]), params, len(text) + i) for i in range(num_drafts + 1)]
        (stands,) = count_accepted((drafts, chosen))
        num_accepted += stands
        text += tuple(chosen[: stands + 1])
    return text[:SEQUENCE_TOKENS], num_accepted


# --- counting


tokens = st.integers(0, 2)


@given(
    st.lists(
        st.integers(0, 4).flatmap(lambda n: st.tuples(*[st.lists(tokens, min_size=n, max_size=n)] * 2)), min_size=1
    )
)
def test_accepted_drafts_are_the_common_prefix(pairs: list[tuple[list[int], list[int]]]) -> None:
    accepted = count_accepted(*((drafts, [*chosen, 0]) for drafts, chosen in pairs))
    for count, (drafts, chosen) in zip(accepted, pairs, strict=True):
        assert drafts[:count] == chosen[:count]
        assert count == len(drafts) or drafts[count] != chosen[count]


# --- the text


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("is_shared_noise", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafts_never_change_the_text(num_drafts: int, is_shared_noise: bool, temperature: float) -> None:
    for seed in range(15):
        params = SamplingParams(temperature, seed=seed)
        assert decode_with_drafts(params, num_drafts, is_shared_noise)[0] == decode_plainly(params)


def test_shared_noise_makes_drafts_stand_more_often() -> None:
    accepted = {
        shared: sum(decode_with_drafts(SamplingParams(1.0, seed=seed), 2, shared)[1] for seed in range(60))
        for shared in (False, True)
    }
    assert accepted[True] > 1.2 * accepted[False] > 0


# --- the distribution

NUM_SEEDS = 4000
TARGET = torch.tensor([1.0, 0.0, -1.0, 0.5, -0.5, 2.0])
DRAFT = torch.tensor([0.0, 1.0, -1.0, 1.5, -2.0, 1.0])


def sample_seeds(logits: Tensor, position: int) -> Tensor:
    """[S] tokens at one position, one per seed."""
    params = [SamplingParams(seed=seed) for seed in range(NUM_SEEDS)]
    return sample(logits.repeat(NUM_SEEDS, 1), build_sampling_batch(params, [position] * NUM_SEEDS))


def assert_follows_softmax(tokens: Tensor, logits: Tensor) -> None:
    counts = torch.bincount(tokens, minlength=len(logits))
    assert abs(chi_square_sigmas(counts, torch.softmax(logits.double(), 0) * len(tokens))) < 5


def test_tokens_follow_the_softmax_with_a_drafter_of_other_logits_and_the_same_noise() -> None:
    drafts = torch.stack([sample_seeds(DRAFT, position) for position in (3, 4)], 1).tolist()
    chosen = torch.stack([sample_seeds(TARGET, position) for position in (3, 4, 5)], 1).tolist()
    accepted = count_accepted(*zip(drafts, chosen, strict=True))
    assert_follows_softmax(torch.tensor([tokens[0] for tokens in chosen]), TARGET)
    for num_standing in (1, 2):  # the token after this many drafts, given that they are accepted
        tokens = [row[num_standing] for row, stands in zip(chosen, accepted, strict=True) if stands >= num_standing]
        assert 0.1 * NUM_SEEDS < len(tokens) < NUM_SEEDS, "the drafter is neither useless nor perfect"
        assert_follows_softmax(torch.tensor(tokens), TARGET)
