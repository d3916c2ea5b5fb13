"""Log-probabilities against log_softmax and a stable sort."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.logprobs import find_logprobs


@given(
    seed=st.integers(0, 1000),
    vocabulary=st.sampled_from([1, 2, 50, 4097, 9000]),
    rows=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([0, 1, 2, 5, 20, 60])), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),  # bfloat16: ties
)
@settings(max_examples=80)
def test_fast_equals_slow(seed: int, vocabulary: int, rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
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


def test_no_rows() -> None:
    assert find_logprobs(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64), []).read() == []
