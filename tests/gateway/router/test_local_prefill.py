"""Where short prompts are computed on GPUs: tables of derived figures, and what must never turn the choice around."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.router.local_prefill import MOST_TOKENS, ChunkCosts, Rate, prefers_local

KV_BYTES = 131_072  # a token of an 8B model
BY_IPC, BY_GRPC = KV_BYTES / 100e9, KV_BYTES / 0.8e9  # seconds a token
FP8 = ChunkCosts(quiet_s=0.0028, fixed_s=0.0024, token_s=2e-5, tokens=256, read_s=BY_IPC)  # 8B on an H100, derived


def most_local(costs: ChunkCosts, num_answers: int, num_waiting: int = 0) -> int:
    """The longest prompt, in steps of 16 tokens, that the decode worker computes; 0 if none."""
    rates = [Rate(num_waiting, 40_000)]
    sizes = range(16, 2 * MOST_TOKENS, 16)
    return max((size for size in sizes if prefers_local(size, num_answers, 0, costs, rates)[0]), default=0)


@pytest.mark.parametrize(
    ("read_s", "num_answers", "num_waiting", "most"),
    [
        (BY_IPC, 0, 0, 256),
        (BY_IPC, 1, 0, 0),
        (BY_IPC, 8, 8000, 768),
        (BY_IPC, 32, 8000, 192),
        (BY_GRPC, 0, 0, MOST_TOKENS),
        (BY_GRPC, 4, 0, MOST_TOKENS),
        (BY_GRPC, 16, 0, 0),
    ],
)
def test_an_idle_or_badly_connected_decode_worker_computes_more(
    read_s: float, num_answers: int, num_waiting: int, most: int
) -> None:
    assert most_local(replace(FP8, read_s=read_s), num_answers, num_waiting) == most


def test_nothing_is_computed_here_before_both_sides_are_known() -> None:
    assert prefers_local(16, 0, 0, ChunkCosts(), [Rate(0, 40_000)]) == (False, "")
    assert prefers_local(16, 0, 0, FP8, [Rate(0, 0.0)]) == prefers_local(16, 0, 0, FP8, []) == (False, "")
    unmeasured = ChunkCosts(quiet_s=0.0028, tokens=256)
    assert prefers_local(64, 0, 0, unmeasured, [Rate(0, 40_000)])[0], "as fast as there, and then it is measured"


SECONDS = st.floats(0, 0.1)


@given(
    st.builds(ChunkCosts, SECONDS, SECONDS, st.floats(1e-6, 1e-3), st.integers(16, 512), st.floats(0, 1e-3)),
    st.integers(1, 4000), st.integers(0, 64), st.integers(0, 10_000), st.integers(0, 10_000), st.floats(1, 1e6),
)  # fmt: skip
def test_load_moves_prompts_away_from_where_it_is(
    costs: ChunkCosts, num_tokens: int, num_answers: int, here: int, there: int, rate: float
) -> None:
    is_local, why = prefers_local(num_tokens, num_answers, here, costs, [Rate(there, rate)])
    assert why and not (is_local and num_tokens > MOST_TOKENS)
    if is_local:
        worse = [Rate(there + 100, rate)]
        assert prefers_local(num_tokens, num_answers, here, costs, worse)[0]
        assert prefers_local(num_tokens, num_answers, here, replace(costs, read_s=costs.read_s + 1e-4), worse)[0]
    else:
        assert not prefers_local(num_tokens, num_answers + 1, here + 100, costs, [Rate(there, rate)])[0]
        assert not prefers_local(num_tokens, num_answers, here, costs, [Rate(there, rate), Rate(0, 1e9)])[0]
