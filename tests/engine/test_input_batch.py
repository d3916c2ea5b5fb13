"""Rows of a batch: open ones are separate from closed ones, and counts equal a fresh count."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.input_batch import InputBatch
from engine.sampling.fields import SEEN_BIT
from engine.staging import upload
from tests.support.combinations import examples
from wire.sampling import SamplingParams

CPU = torch.device("cpu")
VOCAB = 40
PENALTIES = SamplingParams(presence_penalty=1.0)


def count_slowly(tokens: list[int], answer_begin: int) -> list[int]:
    """[V]"""
    seen, answer = set(tokens), Counter(tokens[answer_begin:])
    return [answer[token] + SEEN_BIT * (token in seen) for token in range(VOCAB)]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_counts_are_those_of_counting_anew(data: st.DataObject) -> None:
    rows = InputBatch(8, 30, 4, VOCAB, CPU)
    open_rows: dict[int, tuple[list[int], int, bool]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.integers(0, 7))
        if row in open_rows and data.draw(st.booleans()):
            rows.close(row)
            del open_rows[row]
        elif row not in open_rows:
            tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=30))
            begin, is_penalised = data.draw(st.integers(1, len(tokens))), data.draw(st.booleans())
            sampling = PENALTIES if is_penalised else SamplingParams()
            rows.open(row, np.array(tokens, np.int32), sampling, begin)
            open_rows[row] = tokens, begin, is_penalised
        counted = [one for one, (_, _, is_penalised) in open_rows.items() if is_penalised and data.draw(st.booleans())]
        ends = [data.draw(st.integers(int(rows.num_counted[one]), len(open_rows[one][0]))) for one in counted]
        if counted:
            rows.count_tokens(np.array(counted), np.array(ends))
        for one, (tokens, begin, is_penalised) in open_rows.items():
            line = rows.counts_line[one]
            assert (line >= 0) == is_penalised
            if is_penalised:
                assert rows.counts[line].tolist() == count_slowly(tokens[: rows.num_counted[one]], begin)


def test_numbers_beyond_float32_are_its_largest() -> None:
    rows = InputBatch(1, 30, 4, VOCAB, CPU)
    rows.open(0, np.zeros(1, np.int32), SamplingParams(temperature=1e300, presence_penalty=-1e300), 1)
    most = np.finfo(np.float32).max
    assert (rows.params["temperature"][0], rows.params["presence_penalty"][0]) == (most, -most)


def test_counts_do_not_shrink_and_tokens_stay_within_the_row() -> None:
    rows = InputBatch(2, 30, 4, VOCAB, CPU)
    rows.open(1, np.arange(9, dtype=np.int32), PENALTIES, 5)
    rows.count_tokens(np.array([1]), np.array([7]))
    with pytest.raises(ValueError, match=r"\[7\] tokens were counted in rows \[1\], now \[6\]"):
        rows.count_tokens(np.array([1]), np.array([6]))
    with pytest.raises(ValueError, match="47 tokens in a row of 46"):
        rows.write_tokens([(0, 44, np.zeros(3, np.int32))])


def test_drafts_of_all_rows_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, copies = InputBatch(3, 30, 4, VOCAB, CPU), 0

    def count(arrays: list[Any], device: torch.device) -> list[Tensor]:
        nonlocal copies
        copies += 1
        return upload(arrays, device)

    monkeypatch.setattr("engine.input_batch.upload", count)
    rows.write_tokens([(2, 7, np.array([1, 2, 3], np.int32)), (0, 0, np.array([4], np.int32))])
    rows.write_tokens([])
    assert copies == 1
    assert rows.tokens[2, 6:11].tolist() == [0, 1, 2, 3, 0] and rows.tokens[0, :2].tolist() == [4, 0]
    assert rows.tokens.count_nonzero() == 4


def test_biases_of_tokens_beyond_the_vocabulary_are_dropped() -> None:
    """Kernels trust the others."""
    rows = InputBatch(2, 30, 4, VOCAB, CPU)
    for row, biased in enumerate(((3, VOCAB), (VOCAB + 7,))):
        rows.open(row, np.arange(9, dtype=np.int32), SamplingParams(logit_bias=tuple((one, 1.0) for one in biased)), 5)
    assert [rows.bias[row][0].tolist() for row in (0, 1)] == [[3], []]


def test_close_leaves_nothing_of_a_sequence() -> None:
    rows = InputBatch(2, 30, 4, VOCAB, CPU)
    rows.open(0, np.arange(9, dtype=np.int32), SamplingParams(logit_bias=((3, 1.0),), presence_penalty=1.0), 5)
    rows.write_pages(0, 1, [7, 8])
    assert rows.page_table[0, :4].tolist() == [0, 7, 8, 0]
    rows.close(0)
    assert not rows.page_table.any() and not rows.bias and not rows.has_bias.any() and rows.counts_line[0] == -1
