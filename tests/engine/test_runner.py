"""The runner: a token for every requested row, scores of given tokens, and rows independent of each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

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
from wire.logprobs import TokenLogprobs
from wire.sampling import SamplingParams

__all__ = ["one_thread"]  # a fixture

VOCAB, PAGE_TOKENS, NUM_TOKENS, ROW_PAGES = 300, 16, 60, 5
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Model:
    folder: Path
    decoder: Decoder
    ids: list[int]  # a text of NUM_TOKENS
    logits: Tensor  # [NUM_TOKENS, VOCAB] by transformers

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
    folder = tmp_path_factory.mktemp("runner")
    shape: dict[str, Any] = {"family": "llama", "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "tied": False}
    write_checkpoint(folder, vocab=VOCAB, **shape)
    ids = torch.randint(2, VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    return Model(folder, load_model(folder, "auto", torch.device("cpu")), ids, logits)


def open_row(rows: InputBatch, row: int, ids: list[int], sampling: SamplingParams = GREEDY, prompt: int = 60) -> None:
    rows.open(row, np.array(ids, np.int32), sampling, prompt)
    rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))


def allow(*tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[1, ceil(V / 32)] the mask that allows these tokens."""
    mask = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    for token in tokens:
        mask[0, token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_prompt_scores_equal_log_softmax_of_transformers(
    model: Model, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "CHUNK_VALUES", chunk_rows * VOCAB)
    (runner, rows), ids = model.build(), model.ids
    open_row(rows, 2, ids)
    tokens: list[int] = []
    told: list[TokenLogprobs | None] = []
    for begin, end in ((0, 1), (1, 20), (20, NUM_TOKENS - 1)):
        answers = runner.launch(
            [ForwardRow(2, begin, end - begin, end - begin, end - begin, given_logprobs=3)]
        ).collect()
        tokens += answers.tokens
        told += answers.logprobs
    assert tokens == ids[1:] and rows.tokens[2, :NUM_TOKENS].tolist() == ids
    expected = torch.log_softmax(model.logits, -1)
    for position, one in enumerate(told, start=1):
        row = expected[position - 1]
        assert one is not None
        assert one.logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
        assert one.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert row[list(one.top_ids)].tolist() == pytest.approx(one.top_logprobs, abs=1e-4)


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


def test_log_probabilities_are_those_before_any_adjustment(model: Model) -> None:
    runner, rows = model.build()
    open_row(rows, 0, model.ids, SamplingParams(seed=3))
    open_row(rows, 1, model.ids, SamplingParams(0.3, logit_bias=((9, 50.0),), repetition_penalty=1.5))
    requests = [ForwardRow(0, 0, 60, 1, chosen_logprobs=4), ForwardRow(1, 0, 60, 1, chosen_logprobs=4, mask=allow(5))]
    answers = runner.launch(requests).collect()
    free, forced = answers.logprobs
    assert free is not None and forced is not None and answers.tokens[1] == 5
    assert forced.top_ids == free.top_ids
    assert forced.logprob == pytest.approx(float(torch.log_softmax(model.logits[-1], -1)[5]), abs=1e-4)


def test_greedy_takes_the_largest_allowed_logit_and_writes_it(model: Model) -> None:
    runner, rows = model.build()
    best, second, third = model.logits[-1].topk(3).indices.tolist()
    for row in (0, 3):
        open_row(rows, row, model.ids)
    answers = runner.launch([ForwardRow(0, 0, 60, 1), ForwardRow(3, 0, 60, 1, mask=allow(third, second))]).collect()
    assert answers.tokens == [best, second] and answers.logprobs == []
    assert rows.tokens[[0, 3], 60].tolist() == [best, second]
    with pytest.raises(ValueError, match=r"the mask is int32 \(1, 10\), expected int32 \(2, 10\)"):
        runner.launch([ForwardRow(0, 0, 5, 2, mask=allow(1))])


def test_a_step_with_drafts_says_what_plain_steps_say(model: Model) -> None:
    likely = tuple((token, 20.0) for token in range(5, 9))  # so that the penalties decide
    sampling = SamplingParams(0.8, 0.95, seed=11, frequency_penalty=6.0, repetition_penalty=1.3, logit_bias=likely)
    runner, rows = model.build()
    open_row(rows, 0, model.ids[:20], sampling, prompt=20)
    plain = runner.launch([ForwardRow(0, 0, 20, 1)]).collect().tokens
    for begin in range(20, 27):
        plain += runner.launch([ForwardRow(0, begin, 1, 1)]).collect().tokens

    drafts = [*plain[1:4], (plain[4] + 1) % VOCAB, plain[5]]
    runner, rows = model.build()
    open_row(rows, 0, model.ids[:20], sampling, prompt=20)
    runner.launch([ForwardRow(0, 0, 20, 0)]).collect()
    rows.write_tokens(0, 20, np.array([plain[0], *drafts], np.int32))
    answers = runner.launch([ForwardRow(0, 20, 6, 6)]).collect()
    chosen = answers.tokens
    assert answers.num_accepted == {0: 3}
    assert chosen[:4] == plain[1:5]
    rest = []
    for begin in range(24, 27):
        rest += runner.launch([ForwardRow(0, begin, 1, 1)]).collect().tokens
    assert rest == plain[5:], "wrong drafts are not counted"


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
