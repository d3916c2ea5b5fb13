"""The runner: a token for every requested row, and rows independent of each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import runner as runner_module
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import ForwardRow
from engine.input_batch import InputBatch
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.runner import Runner
from tests.support.checkpoints import write_checkpoint
from tests.support.threads import one_thread
from wire.kv_layout import pool_sizes
from wire.sampling import SamplingParams

__all__ = ["one_thread"]  # a fixture

VOCAB, PAGE_TOKENS, NUM_TOKENS, ROW_PAGES = 300, 16, 60, 5
GREEDY = SamplingParams(temperature=0.0)


class Model:
    def __init__(self, folder: Path) -> None:
        shape: dict[str, Any] = {"family": "llama", "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "tied": False}
        self.decoder = load_model(write_checkpoint(folder, vocab=VOCAB, **shape), "auto", torch.device("cpu"))
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(2, VOCAB, (NUM_TOKENS,), generator=generator).tolist()

    def build(self) -> tuple[Runner, InputBatch]:
        """With empty pages and rows."""
        config = self.decoder.config
        pages = torch.zeros(
            pool_sizes(
                num_pages=40, num_kv_heads=config.num_kv_heads, num_layers=config.num_layers,
                page_tokens=PAGE_TOKENS, head_dim=config.head_dim,
            )
        )  # fmt: skip
        rows = InputBatch(8, NUM_TOKENS, PAGE_TOKENS, VOCAB, torch.device("cpu"))
        return Runner(self.decoder, TorchSdpaAttention(config.attention_shapes[0]), pages, rows), rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("runner"))


def open_row(rows: InputBatch, row: int, ids: list[int], sampling: SamplingParams = GREEDY, prompt: int = 60) -> None:
    rows.open(row, np.array(ids, np.int32), sampling, prompt)
    rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))


def allow(*tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[1, ceil(V / 32)] the mask that allows these tokens."""
    mask = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    for token in tokens:
        mask[0, token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def test_the_head_is_read_once_a_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    (runner, rows), num_rows = model.build(), []
    logits = Decoder.logits

    def count(self: Decoder, hidden: Tensor) -> Tensor:
        num_rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "logits", count)
    for row in range(4):
        open_row(rows, row, model.ids)
    runner.launch([ForwardRow(row, 0, NUM_TOKENS - 1, NUM_TOKENS - 1, NUM_TOKENS - 1) for row in range(4)]).collect()
    assert num_rows == [4 * (NUM_TOKENS - 1)] and num_rows[0] > 128


def test_greedy_takes_the_largest_allowed_logit_and_writes_it(model: Model) -> None:
    runner, rows = model.build()
    for row in (0, 3):
        open_row(rows, row, model.ids)
    (scored,) = runner.launch([ForwardRow(0, 0, 60, 1, chosen_logprobs=3)]).collect().logprobs
    assert scored is not None
    best, second, third = scored.top_ids
    answers = runner.launch([ForwardRow(0, 0, 60, 1), ForwardRow(3, 0, 60, 1, mask=allow(third, second))]).collect()
    assert answers.tokens == [best, second] and answers.logprobs == []
    assert rows.tokens[[0, 3], 60].tolist() == [best, second]
    with pytest.raises(ValueError, match=r"the mask is int32 \(1, 10\), expected int32 \(2, 10\)"):
        runner.launch([ForwardRow(0, 0, 5, 2, mask=allow(1))])


def test_rows_do_not_know_of_each_other(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        ForwardRow(0, 0, 30, 2, num_given=1, chosen_logprobs=2), ForwardRow(1, 0, 41), ForwardRow(2, 0, 45, 3),
        ForwardRow(3, 0, 50, 1, num_given=1, given_logprobs=1),
        ForwardRow(4, 0, 46, 1, mask=allow(*range(0, VOCAB, 3))),
    ]  # fmt: skip

    def build() -> Runner:
        runner, rows = model.build()
        for row, sampling in enumerate(
            (
                SamplingParams(seed=1, presence_penalty=1.0),
                GREEDY,
                SamplingParams(0.7, 0.9, seed=2, repetition_penalty=1.2),
                GREEDY,
                SamplingParams(top_k=5, seed=3, logit_bias=((6, 2.0),)),
            )
        ):
            open_row(rows, row, model.ids, sampling, prompt=10)
        return runner

    together = build().launch(requests).collect()
    alone, logprobs = [], []
    for one in requests:
        answers = build().launch([one]).collect()
        alone += answers.tokens
        logprobs += answers.logprobs or [None] * one.num_logits
    monkeypatch.setattr(runner_module, "CHUNK_VALUES", 2 * VOCAB)
    in_chunks = build().launch(requests).collect()
    assert together.tokens == alone == in_chunks.tokens
    assert together.tokens[0] == model.ids[29] and together.tokens[5] == model.ids[50]
    for told in (together.logprobs, in_chunks.logprobs):
        assert [one and one.top_ids for one in told] == [one and one.top_ids for one in logprobs]
    assert [one is None for one in together.logprobs] == [False, False, True, True, True, False, True]
