"""Two steps launched ahead of the one that is collected give the tokens of step by step, whatever the sampling."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import Slice
from engine.model.decoder import Decoder
from engine.model.weights import load_model
from engine.rows import Rows
from engine.runner import Runner
from tests.checkpoints import write_checkpoint
from tests.late_runner import LateRows, LateRunner
from wire.sampling import SamplingParams

CPU = torch.device("cpu")
VOCAB, PAGE_TOKENS, CONTEXT, ROW_PAGES = 300, 16, 64, 5
NUM_TOKENS, AHEAD = 16, 2
GRID = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(0.7, seed=2, top_k=5),
    SamplingParams(1.3, seed=3, top_p=0.8),
    SamplingParams(seed=4, min_p=0.1),
    SamplingParams(0.9, seed=5, top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(0.0, frequency_penalty=2.0),
    SamplingParams(0.8, seed=6, presence_penalty=3.0),
    SamplingParams(0.0, repetition_penalty=1.5),
    SamplingParams(seed=7, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(0.0, logit_bias=((5, 3.0), (9, -50.0))),
    SamplingParams(seed=(1 << 64) - 1, logit_bias=((5, 8.0),), repetition_penalty=1.4),
]
PROMPTS = [np.random.default_rng(row).integers(2, VOCAB, 3 + 3 * row, np.int32) for row in range(len(GRID))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("model"), "llama", vocab=VOCAB, hidden=64, head_dim=16)
    return load_model(folder, "auto", CPU)


def build_pages(decoder: Decoder) -> torch.Tensor:
    config = decoder.config
    shape = (len(GRID) * ROW_PAGES, config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
    return torch.zeros(shape)


def build_late(decoder: Decoder) -> tuple[LateRunner, LateRows]:
    rows = LateRows(len(GRID), CONTEXT, PAGE_TOKENS, VOCAB, CPU)
    attention = TorchSdpaAttention(decoder.config.attention_shape)
    return LateRunner(decoder, attention, build_pages(decoder), rows), rows


def open_row(rows: Rows, row: int, which: int) -> None:
    """The `which`-th prompt, with its sampling."""
    rows.open(row, PROMPTS[which], GRID[which], len(PROMPTS[which]))
    rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))


def plan(step: int, rows: Sequence[int], which: Sequence[int]) -> list[Slice]:
    """A prompt, then a token at a time."""
    lengths = [len(PROMPTS[one]) for one in which]
    if step == 0:
        return [Slice(row, 0, length, 1) for row, length in zip(rows, lengths, strict=True)]
    return [Slice(row, length + step - 1, 1, 1) for row, length in zip(rows, lengths, strict=True)]


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[list[int]]:
    """Each answer, step by step, alone."""
    answers = []
    for which in range(len(GRID)):
        rows = Rows(len(GRID), CONTEXT, PAGE_TOKENS, VOCAB, CPU)
        runner = Runner(decoder, TorchSdpaAttention(decoder.config.attention_shape), build_pages(decoder), rows)
        open_row(rows, 0, which)
        steps = range(NUM_TOKENS)
        answers.append([runner.launch(plan(step, [0], [which])).collect().tokens[0] for step in steps])
    return answers


def test_steps_ahead_give_the_tokens_of_step_by_step(decoder: Decoder, expected: list[list[int]]) -> None:
    runner, rows = build_late(decoder)
    everyone = range(len(GRID))
    for row in everyone:
        open_row(rows, row, row)
    launched = [runner.launch(plan(step, everyone, everyone)) for step in range(AHEAD)]
    told = []
    for step in range(AHEAD, NUM_TOKENS + AHEAD):
        launched.append(runner.launch(plan(step, everyone, everyone)))
        told.append(launched.pop(0).collect().tokens)
    assert [list(answer) for answer in zip(*told, strict=True)] == expected


def test_a_row_is_taken_over_while_steps_of_its_last_sequence_are_on_their_way(
    decoder: Decoder, expected: list[list[int]]
) -> None:
    """With its pages and its line of counts. What those steps still write is overwritten."""
    runner, rows = build_late(decoder)
    first, second = 9, 11
    open_row(rows, 0, first)
    leaving = [runner.launch(plan(step, [0], [first])) for step in range(4)]
    assert leaving[0].collect().tokens == expected[first][:1]
    rows.close(0)
    open_row(rows, 0, second)
    launched = [runner.launch(plan(step, [0], [second])) for step in range(NUM_TOKENS)]
    assert [step.collect().tokens[0] for step in launched] == expected[second]


def test_reading_before_the_step_has_run_finds_no_token(decoder: Decoder, expected: list[list[int]]) -> None:
    """So the double notices what it is for."""
    runner, rows = build_late(decoder)
    open_row(rows, 0, 0)
    step = runner.launch(plan(0, [0], [0]))
    place = len(PROMPTS[0])
    assert rows.tokens[0, place] == -1
    assert step.collect().tokens == expected[0][:1] and rows.tokens[0, place] == expected[0][0]
