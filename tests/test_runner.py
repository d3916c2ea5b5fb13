"""The runner: a choice for every wanted row, scores of given tokens, and no row that knows of another."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import runner as runner_module
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import SequenceSlice
from engine.choice import Choice, Chosen
from engine.model.weights import load_model
from engine.runner import Runner
from engine.sampling import SamplingParams
from engine.speculative import count_accepted
from tests.checkpoints import write_checkpoint

VOCAB, PAGE_TOKENS, NUM_TOKENS = 300, 16, 60
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@dataclass
class Model:
    folder: Path
    ids: list[int]  # a text of NUM_TOKENS
    logits: Tensor  # [NUM_TOKENS, VOCAB] by transformers

    def build_runner(self) -> Runner:
        decoder = load_model(self.folder, "auto", torch.device("cpu"))
        config = decoder.config
        pages = torch.zeros(32, config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
        return Runner(decoder, TorchSdpaAttention(config.attention_shape), pages)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("runner")
    shape: dict[str, Any] = {"family": "llama", "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "tied": False}
    write_checkpoint(folder, vocab=VOCAB, **shape)
    ids = torch.randint(2, VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    return Model(folder, ids, logits)


def part(ids: list[int], begin: int, end: int, num_logits: int, first_page: int = 0) -> SequenceSlice:
    return SequenceSlice(ids[begin:end], begin, range(first_page, first_page + 4), num_logits)


def score(ids: list[int], position: int, num_logprobs: int | None = 3) -> Choice:
    return Choice(GREEDY, position, ids, len(ids), num_logprobs=num_logprobs, is_given=True)


@pytest.mark.parametrize("piece_rows", [1, 7, 128])
def test_prompt_scores_equal_log_softmax_of_transformers(
    model: Model, piece_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows of logits are held at once."""
    monkeypatch.setattr(runner_module, "PIECE_ROWS", piece_rows)
    runner, ids = model.build_runner(), model.ids
    told: list[Chosen] = []
    for begin, end in ((0, 1), (1, 20), (20, NUM_TOKENS - 1)):
        choices = [score(ids, position) for position in range(begin + 1, end + 1)]
        told += runner.run([part(ids, begin, end, end - begin)], choices)
    expected = torch.log_softmax(model.logits, -1)
    for position, one in enumerate(told, start=1):
        row = expected[position - 1]
        assert one.token == ids[position] and one.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
        assert one.logprobs.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert row[list(one.logprobs.top_ids)].tolist() == pytest.approx(one.logprobs.top_logprobs, abs=1e-4)


def test_log_probabilities_are_those_before_any_adjustment(model: Model) -> None:
    ids, mask = model.ids, np.zeros(-(-VOCAB // 32), np.int32)
    mask[0] = 1 << 5
    plain = Choice(SamplingParams(seed=3), 60, ids, 60, num_logprobs=4)
    bent = replace(plain, sampling=SamplingParams(0.3, logit_bias=((9, 50.0),), repetition_penalty=1.5), mask=mask)
    step = [part(ids, 0, 60, 1)]
    (free,), (forced,) = model.build_runner().run(step, [plain]), model.build_runner().run(step, [bent])
    assert free.logprobs is not None and forced.logprobs is not None and forced.token == 5
    assert forced.logprobs.top_ids == free.logprobs.top_ids
    assert forced.logprobs.logprob == pytest.approx(float(torch.log_softmax(model.logits[-1], -1)[5]), abs=1e-4)


def test_greedy_takes_the_largest_adjusted_logit(model: Model) -> None:
    ids = model.ids
    best, second = model.logits[-1].topk(2).indices.tolist()
    choice = Choice(GREEDY, 60, ids, 60)
    choices = [choice, replace(choice, forbidden=frozenset({best}))]
    chosen = model.build_runner().run([part(ids, 0, 60, 1), part(ids, 0, 60, 1, first_page=4)], choices)
    assert [one.token for one in chosen] == [best, second]
    assert [one.logprobs for one in chosen] == [None, None]


def test_a_step_with_drafts_says_what_plain_steps_say(model: Model) -> None:
    """Right drafts up to the third, then a wrong one: the rows until it, and it alone, choose as without drafts."""
    prompt, params = model.ids[:20], SamplingParams(0.8, top_p=0.95, seed=11, frequency_penalty=0.5)
    text, runner = list(prompt), model.build_runner()
    for begin in [0, *range(20, 27)]:
        text.append(runner.run([part(text, begin, len(text), 1)], [Choice(params, len(text), list(text), 20)])[0].token)
    plain = text[20:]

    drafts = [*plain[1:4], (plain[4] + 1) % VOCAB, plain[5]]
    drafted, runner = [*prompt, plain[0], *drafts], model.build_runner()
    runner.run([part(drafted, 0, 20, 0)], [])
    choices = [Choice(params, position, drafted, 20) for position in range(21, 27)]
    chosen = [one.token for one in runner.run([part(drafted, 20, 26, 6)], choices)]
    assert count_accepted(drafts, chosen) == 3
    assert chosen[:4] == plain[1:5]


def test_rows_do_not_know_of_each_other(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = model.ids
    slices = [part(ids, 0, 30, 2), part(ids, 0, 41, 0, 4), part(ids, 0, 45, 3, 8), part(ids, 0, 50, 1, 12)]
    choices = [
        Choice(SamplingParams(seed=1, presence_penalty=1.0), 29, ids, 10, num_logprobs=2),
        score(ids, 30),
        Choice(SamplingParams(0.7, 0.9, seed=2), 43, ids, 45),
        Choice(GREEDY, 44, ids, 45, num_logprobs=0),
        Choice(SamplingParams(top_k=5, seed=3, logit_bias=((4, 2.0),)), 45, ids, 45, forbidden=frozenset({4})),
        score(ids, 50, None),
    ]
    together = [one.token for one in model.build_runner().run(slices, choices)]
    wanted, alone = iter(choices), []
    for one in slices:
        own = [next(wanted) for _ in range(one.num_logits)]
        alone += [chosen.token for chosen in model.build_runner().run([one], own)]
    monkeypatch.setattr(runner_module, "PIECE_ROWS", 2)
    in_pieces = [one.token for one in model.build_runner().run(slices, choices)]
    assert together == alone == in_pieces
    assert together[1] == ids[30] and together[5] == ids[50]


def test_there_must_be_a_choice_for_each_row(model: Model) -> None:
    with pytest.raises(ValueError, match="2 rows of logits are wanted, 1 choices"):
        model.build_runner().run([part(model.ids, 0, 5, 2)], [score(model.ids, 5)])


def test_a_mask_without_tokens_is_an_error(model: Model) -> None:
    choice = Choice(GREEDY, 5, model.ids, 5, mask=np.zeros(-(-VOCAB // 32), np.int32))
    with pytest.raises(ValueError, match="allows no token"):
        model.build_runner().run([part(model.ids, 0, 5, 1)], [choice])
