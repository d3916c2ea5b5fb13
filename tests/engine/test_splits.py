"""Parts of long contexts, by a twin of FlashInfer's planner: every plan must be one that it takes."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.shape import AttentionShape
from engine.cuda.splits import choose_part, count_programs, find_tile, scratch_bytes

H100, PAGE_TOKENS = 132, 16
LLAMA = AttentionShape(32, 8, 128, 0.1)


class Plan(NamedTuple):
    """What FlashInfer launches."""

    is_split: bool
    programs: int  # that have work
    launched: int  # by a captured step
    part: int  # pages


def plan(contexts: list[int], num_tokens: int, shape: AttentionShape, part: int | None) -> Plan:
    """scheduler.cuh, PrefillSplitQOKVIndptr, with `enable_cuda_graph`; contexts in pages."""
    at_once, size = 2 * H100 // shape.num_kv_heads, len(contexts)
    rows = num_tokens * (shape.num_heads // shape.num_kv_heads)
    tile = find_tile(rows, shape.head_dim)
    tiles = -(-rows // tile)
    total_tiles = size * tiles if num_tokens > 1 else -(-size * rows // tile) + size - 1
    low, high = max(128 // PAGE_TOKENS, 1), max(contexts)
    while part is None and low < high:
        middle = (low + high) // 2
        if sum(tiles * -(-context // middle) for context in contexts) > at_once:
            low = middle + 1
        else:
            high = middle
    chosen = part or low
    parts = [-(-context // chosen) for context in contexts]
    is_split = part is None or max(parts) > 1
    return Plan(is_split, tiles * sum(parts), max(at_once, total_tiles), chosen)


@pytest.mark.parametrize(
    ("others", "tokens"), [(20, None), (32, 14_576), (63, 8192), (127, 4096), (255, 2048), (511, 1024)]
)
def test_one_context_of_128k_is_divided_beside_any_number_of_short_ones(others: int, tokens: int | None) -> None:
    contexts = [64] * others + [8192]
    part = choose_part(np.array(contexts), PAGE_TOKENS, 1, LLAMA, H100)
    assert part == (None if tokens is None else tokens // PAGE_TOKENS)
    assert plan(contexts, 1, LLAMA, None).part == (631 if others == 20 else 8192)  # FlashInfer alone


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=300), st.sampled_from([1, 2, 4, 9]),
    st.sampled_from([(8, 8), (32, 8), (64, 8), (28, 4), (32, 32), (71, 1)]), st.sampled_from([64, 128, 256, 512]),
)  # fmt: skip
def test_a_plan_is_always_one_that_flashinfer_takes(
    contexts: list[int], num_tokens: int, heads: tuple[int, int], head_dim: int
) -> None:
    shape = AttentionShape(*heads, head_dim, 0.1)
    part = choose_part(np.array(contexts), PAGE_TOKENS, num_tokens, shape, H100)
    its_own, ours = plan(contexts, num_tokens, shape, None), plan(contexts, num_tokens, shape, part)
    assert ours.is_split  # as the captured step is
    assert ours.programs <= ours.launched and ours.part <= max(its_own.part, 8)
    if part is not None:
        less = plan(contexts, num_tokens, shape, part - 1)
        assert part == 128 // PAGE_TOKENS or less.programs > less.launched  # the smallest


@given(st.lists(st.integers(1, 16), min_size=1, max_size=300), st.sampled_from([1, 4]))
def test_padding_is_captured_with_flashinfers_own_choice(tokens: list[int], num_tokens: int) -> None:
    """Otherwise the captured step would divide nothing, ever."""
    contexts = np.array([-(-count // PAGE_TOKENS) for count in tokens])
    assert choose_part(contexts, PAGE_TOKENS, num_tokens, LLAMA, H100) is None


def test_scratch_memory_of_as_many_kv_heads_as_heads() -> None:
    """512 sequences need more than FlashInfer's 128 MiB; its first capture would fail."""
    assert count_programs(AttentionShape(32, 32, 128, 0.1), 512, 1) == 543
    assert scratch_bytes(AttentionShape(32, 32, 128, 0.1), 512, 1, H100) == 32 * 543 * 16 * 129 * 4 + 32 > 128 << 20
    assert scratch_bytes(LLAMA, 512, 1, H100) < 64 << 20
