"""A step prepared after others equals the same step prepared alone, whatever changed in the rows between."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ForwardRow
from engine.input_batch import InputBatch
from engine.prepared import Preparer, prepare
from engine.staging import Stager
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams

CPU = torch.device("cpu")
NUM_ROWS, CONTEXT, PAGE_TOKENS, VOCAB = 4, 40, 4, 50
SAMPLINGS = [
    SamplingParams(temperature=0.0), SamplingParams(0.7, 0.9, top_k=3, seed=5),
    SamplingParams(seed=6, frequency_penalty=0.5), SamplingParams(seed=7, logit_bias=((3, 1.0), (9, -2.0))),
]  # fmt: skip
CHANGES: list[dict[str, Any]] = [  # each turns a plain step into another kind
    {"mask": np.full((1, -(-VOCAB // 32)), 5, np.int32)},
    {"count": 2},
    {"num_logits": 0},
    {"num_given": 1},
    {"num_given": 1, "given_logprobs": 2},
    {"chosen_logprobs": 2},
    {"num_drafted": 1},
]


def flatten(value: Any) -> list[Any]:
    """Lists, tuples and dataclasses of arrays as one list of their contents."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, list | tuple):
        return [type(value), *(flatten(one) for one in value)]
    if hasattr(value, "__dataclass_fields__"):
        return [flatten(getattr(value, field.name)) for field in fields(value)]
    return [value]


class Twins:
    """The same rows twice: over the first, steps are prepared one after the other."""

    def __init__(self) -> None:
        self.both = [InputBatch(NUM_ROWS, CONTEXT, PAGE_TOKENS, VOCAB, CPU) for _ in range(2)]
        self.preparer = Preparer(self.both[0])
        self.begins: dict[int, int] = {}  # row |-> position of its next new token

    def open(self, row: int, sampling: SamplingParams, num_prompt: int) -> None:
        for rows in self.both:
            rows.open(row, np.arange(CONTEXT, dtype=np.int32) % VOCAB, sampling, num_prompt)
        self.begins[row] = num_prompt - 1

    def close(self, row: int) -> None:
        for rows in self.both:
            rows.close(row)
        del self.begins[row]

    def write_pages(self, row: int, first: int, page: int) -> None:
        for rows in self.both:
            rows.write_pages(row, first, [page])

    def step(self, requests: list[ForwardRow], chunk_rows: int) -> None:
        after = self.preparer.prepare(requests, chunk_rows)
        assert flatten(after) == flatten(prepare(self.both[1], requests, chunk_rows))
        counts = [rows.counts.tolist() for rows in self.both]
        assert counts[0] == counts[1]


@settings(max_examples=150)
@given(data=st.data())
def test_steps_are_prepared_as_if_they_were_alone(data: st.DataObject) -> None:
    twins = Twins()
    for row in range(data.draw(st.integers(1, NUM_ROWS))):
        twins.open(row, data.draw(st.sampled_from(SAMPLINGS)), data.draw(st.integers(1, 9)))
    order = list(twins.begins)
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.sampled_from(order))
        match data.draw(st.sampled_from(["step", "step", "pages", "another", "order", "other step"])):
            case "pages":
                twins.write_pages(row, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 99)))
            case "another":
                twins.close(row)
                twins.open(row, data.draw(st.sampled_from(SAMPLINGS)), data.draw(st.integers(1, 9)))
            case "order":
                order = data.draw(st.permutations(order))
            case "other step":
                change = data.draw(st.sampled_from(CHANGES))
                parts = [ForwardRow(one, twins.begins[one], 1, 1) for one in order]
                parts[0] = parts[0]._replace(**change)
                twins.step(parts, 2)
                for part in parts:
                    twins.begins[part.row] += part.count
        shown = order[: data.draw(st.integers(max(1, len(order) - 1), len(order)))]
        twins.step([ForwardRow(row, twins.begins[row], 1, 1) for row in shown], data.draw(st.sampled_from([2, 2, 100])))
        for row in shown:
            twins.begins[row] += 1


def test_a_plain_step_shares_what_stays_the_same() -> None:
    rows = InputBatch(NUM_ROWS, CONTEXT, PAGE_TOKENS, VOCAB, CPU)
    for row in range(2):
        rows.open(row, np.zeros(9, np.int32), SAMPLINGS[1], 9)
    preparer = Preparer(rows)
    first, second = [preparer.prepare([ForwardRow(0, at, 1, 1), ForwardRow(1, at, 1, 1)], 100) for at in (9, 10)]
    assert first.layout.page_table is second.layout.page_table
    assert first.layout.cu_seqlens_q is second.layout.cu_seqlens_q
    assert first.chunks[0].sampling.params is second.chunks[0].sampling.params
    rows.write_pages(1, 2, [7])
    third = preparer.prepare([ForwardRow(0, 11, 1, 1), ForwardRow(1, 11, 1, 1)], 100)
    assert third.layout.page_table[1].tolist() == [0, 0, 7]
    assert not second.layout.page_table.any()


def test_a_plain_step_ends_before_its_row_does() -> None:
    rows = InputBatch(NUM_ROWS, CONTEXT, PAGE_TOKENS, VOCAB, CPU)
    preparer = Preparer(rows)
    last = CONTEXT + MAX_DRAFT_TOKENS - 2
    preparer.prepare([ForwardRow(0, last, 1, 1)], 100)
    with pytest.raises(ValueError, match="56 positions and a token after them, in a row of 56"):
        preparer.prepare([ForwardRow(0, last + 1, 1, 1)], 100)


def test_only_new_arrays_are_uploaded() -> None:
    stager = Stager(CPU)
    same, first, second = np.arange(3), np.zeros(2, np.int32), np.ones((2, 2), np.int32)
    kept, old = stager.upload([same, first])
    again, new, more = stager.upload([same, second, first])
    assert again is kept and old.tolist() == [0, 0]
    assert torch.equal(new, torch.ones(2, 2, dtype=torch.int32)) and torch.equal(more, old)
