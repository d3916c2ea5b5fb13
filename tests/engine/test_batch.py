"""The layout of a ragged batch, token by token, against its requests."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ForwardRow, build_batch, lay_out
from engine.input_batch import InputBatch
from engine.staging import Stager
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams

CPU = torch.device("cpu")
CONTEXT, NUM_ROWS, VOCAB = 32, 6, 1000


def build_rows(page_tokens: int, draw: np.random.Generator) -> InputBatch:
    """Rows filled with tokens and pages."""
    rows = InputBatch(NUM_ROWS, CONTEXT, page_tokens, VOCAB, CPU)
    for row in range(NUM_ROWS):
        rows.open(row, draw.integers(0, VOCAB, CONTEXT, np.int32), SamplingParams(), CONTEXT)
        rows.write_pages(row, 0, draw.integers(0, 99, -(-CONTEXT // page_tokens)).tolist())
    return rows


@st.composite
def requests(draw: st.DrawFn, row: int) -> ForwardRow:
    begin, count = draw(st.integers(0, 20)), draw(st.integers(1, 9))
    return ForwardRow(row, begin, count, num_logits=draw(st.integers(0, count)))


@settings(max_examples=60)
@given(data=st.data(), page_tokens=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99))
def test_every_token_lies_where_its_slice_says(data: st.DataObject, page_tokens: int, seed: int) -> None:
    rows = build_rows(page_tokens, np.random.default_rng(seed))
    order = data.draw(st.permutations(range(NUM_ROWS)))[: data.draw(st.integers(1, NUM_ROWS))]
    parts = [data.draw(requests(row)) for row in order]
    batch = build_batch(lay_out(rows, parts), rows, Stager(CPU))

    wanted_rows, at = [], 0
    for index, part in enumerate(parts):
        assert batch.cu_seqlens_q[index] == at
        pages = rows.page_table[part.row]
        for position in range(part.begin, part.begin + part.count):
            assert batch.token_ids[at] == rows.tokens[part.row, position]
            assert batch.positions[at] == position
            assert batch.slot_mapping[at] == pages[position // page_tokens] * page_tokens + position % page_tokens
            at += 1
        context = part.begin + part.count
        assert batch.seq_lens[index] == batch.seq_lens_host[index] == context
        assert batch.query_lens_host[index] == part.count
        used = -(-context // page_tokens)
        assert batch.page_table[index, :used].tolist() == pages[:used].tolist()
        wanted_rows += list(range(at - part.num_logits, at))
    assert batch.page_table.shape[1] == max(-(-(part.begin + part.count) // page_tokens) for part in parts)
    assert batch.cu_seqlens_q[-1] == at == batch.token_ids.shape[0]
    assert batch.logits_rows.tolist() == wanted_rows
    for long in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_rows):
        assert long.dtype is torch.int64
    for short in (batch.cu_seqlens_q, batch.seq_lens, batch.page_table):
        assert short.dtype is torch.int32 and short.is_contiguous()


def test_a_slice_ends_before_its_row_does() -> None:
    rows = build_rows(4, np.random.default_rng(0))
    lay_out(rows, [ForwardRow(0, CONTEXT - 1, MAX_DRAFT_TOKENS, 1)])
    with pytest.raises(ValueError, match="48 positions and a token after them, in a row of 48"):
        lay_out(rows, [ForwardRow(0, CONTEXT - 1, 1 + MAX_DRAFT_TOKENS, 1)])


def test_second_requests_of_rows_wait_for_all_first_ones() -> None:
    """Also if they write to the slots that the first ones read."""
    rows = build_rows(4, np.random.default_rng(0))
    rows.states = (torch.zeros(9, 1),)
    first = [ForwardRow(row, 4, 4, state_from=2 * row, state_to=2 * row + 1) for row in range(3)]
    second = [ForwardRow(row, 8, 2, state_from=2 * row + 1, state_to=2 * row) for row in (0, 2)]
    for parts, split in ((first, None), (first + second, 3), (first[:1] + second[:1], 1)):
        states = build_batch(lay_out(rows, parts), rows, Stager(CPU)).states
        assert states is not None and states.split == split
        assert states.sources.tolist() == [part.state_from for part in parts]
        assert states.targets.tolist() == [part.state_to for part in parts]
