"""Where short prompts are computed on GPUs: tables of derived figures, and what must never turn the choice around."""

from dataclasses import replace

import pytest

from gateway.policies.local_prefill import MOST_TOKENS, Rate, prefers_local
from gateway.router.worker_view import ChunkCosts

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
