"""The layout of a ragged batch: its bounds, and states that a second request of a row continues."""

import numpy as np
import pytest
import torch

from engine.batch import ForwardRow, build_batch, lay_out
from engine.input_batch import InputBatch
from engine.staging import Stager
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams

CPU = torch.device("cpu")
CONTEXT = 32


def build_rows() -> InputBatch:
    rows = InputBatch(6, CONTEXT, 4, 1000, CPU)
    for row in range(3):
        rows.open(row, np.zeros(CONTEXT, np.int32), SamplingParams(), CONTEXT)
        rows.write_pages(row, 0, range(8))
    return rows


def test_a_slice_ends_before_its_row_does() -> None:
    rows = build_rows()
    lay_out(rows, [ForwardRow(0, CONTEXT - 1, MAX_DRAFT_TOKENS, 1)])
    with pytest.raises(ValueError, match="48 positions and a token after them, in a row of 48"):
        lay_out(rows, [ForwardRow(0, CONTEXT - 1, 1 + MAX_DRAFT_TOKENS, 1)])


def test_second_requests_of_rows_wait_for_all_first_ones() -> None:
    """Also if they write to the slots that the first ones read."""
    rows = build_rows()
    rows.states = (torch.zeros(9, 1),)
    first = [ForwardRow(row, 4, 4, state_from=2 * row, state_to=2 * row + 1) for row in range(3)]
    second = [ForwardRow(row, 8, 2, state_from=2 * row + 1, state_to=2 * row) for row in (0, 2)]
    for parts, split in ((first, None), (first + second, 3), (first[:1] + second[:1], 1)):
        states = build_batch(lay_out(rows, parts), rows, Stager(CPU)).states
        assert states is not None and states.split == split
        assert states.sources.tolist() == [part.state_from for part in parts]
        assert states.targets.tolist() == [part.state_to for part in parts]
