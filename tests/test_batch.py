"""The layout of a ragged batch, token by token, against the slices it was made of."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import SequenceSlice, build_batch

CPU = torch.device("cpu")


@st.composite
def slices(draw: st.DrawFn, page_tokens: int) -> SequenceSlice:
    begin, count = draw(st.integers(0, 20)), draw(st.integers(1, 9))
    needed = -(-(begin + count) // page_tokens)
    pages = draw(st.lists(st.integers(0, 99), min_size=needed, max_size=needed + 2, unique=True))
    tokens = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
    return SequenceSlice(tokens, begin, pages, num_logits=draw(st.integers(0, count)))


@settings(max_examples=60)
@given(data=st.data(), page_tokens=st.sampled_from([1, 4, 16]))
def test_every_token_lies_where_its_slice_says(data: st.DataObject, page_tokens: int) -> None:
    parts = data.draw(st.lists(slices(page_tokens), min_size=1, max_size=5))
    batch = build_batch(parts, page_tokens, CPU)

    wanted_rows, row = [], 0
    for index, part in enumerate(parts):
        assert batch.query_starts[index] == row
        for offset, token in enumerate(part.token_ids):
            position = part.begin + offset
            assert batch.token_ids[row] == token
            assert batch.positions[row] == position
            assert batch.write_pages[row] == part.pages[position // page_tokens]
            assert batch.write_offsets[row] == position % page_tokens
            row += 1
        context = part.begin + len(part.token_ids)
        assert batch.context_lens[index] == context
        used = -(-context // page_tokens)
        assert batch.page_table[index, :used].tolist() == list(part.pages[:used])
        assert not batch.page_table[index, used:].any(), "padding must be page 0, which always exists"
        wanted_rows += list(range(row - part.num_logits, row))
    assert batch.query_starts[-1] == row == batch.token_ids.shape[0]
    assert batch.logits_rows.tolist() == wanted_rows
    assert batch.query_lens_host == tuple(len(part.token_ids) for part in parts)
    assert batch.context_lens_host == tuple(batch.context_lens.tolist())


def test_types_are_those_that_kernels_expect() -> None:
    batch = build_batch([SequenceSlice([7], 3, [5], num_logits=1)], 4, CPU)
    for long in (batch.token_ids, batch.positions, batch.write_pages, batch.write_offsets, batch.logits_rows):
        assert long.dtype is torch.int64
    for short in (batch.query_starts, batch.context_lens, batch.page_table):
        assert short.dtype is torch.int32
