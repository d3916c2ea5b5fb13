"""Draft heads compute what plain torch does over whole sequences: after prompts in chunks, drafts right and wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.doctor_probe import examine_model
from engine.batch import ForwardRow, take_turns
from engine.catalogue import load_config
from engine.compose import build_engine
from engine.engine import Engine
from engine.heads.read_head import read_head
from engine.heads.read_medusa import WEIGHTS
from engine.heads.runner import HeadRunner
from engine.models.table import shard_config
from engine.weights.table import Shard
from runtime.config import ServeConfig
from runtime.settings import ConfigError
from tests.support.combinations import others
from tests.support.draft_heads import (
    DRAFT_VOCAB,
    MEDUSA,
    Head,
    draft_truth,
    write_eagle3,
    write_medusa,
    write_mtp,
    write_target,
)
from tests.support.random_models import write_tokenizer
from tests.support.tiny_models import VOCAB
from wire.names import Quantization
from wire.sampling import SamplingParams
from worker.startup.device_limits import read_headers
from worker.startup.models import check_models

GREEDY = SamplingParams(temperature=0.0)
NUM_TOP, DEPTH = 10, 3
PROMPTS = [torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
           for length in (37, 18)]  # fmt: skip
FLAGS = {
    "specforge": {}, "all words": {}, "speculators": {}, "residual": {"norm_before_residual": True},
    "one norm": {"norm_before_fc": True}, "norms": {"fc_norm": True, "norm_output": True},
    "exaone4": {}, "qwen3_next": {},  # models that run by transformers' code
}  # fmt: skip

BESIDE_STATES = " beside recurrent state"  # in a model that runs by transformers' code
MTP = ("glm4_moe", "glm4_moe_lite", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3")


def build(model: Path, draft_model: str) -> Engine:
    return build_engine(
        str(model), draft_model, "float32", "cpu", 1, 16, 4, lambda *_: (40, 8), lambda _done, _total: None, 96
    )


def write_head(folder: Path, kind: str) -> tuple[Any, Head]:
    if kind in MTP:
        return write_mtp(folder / "model", kind)
    shapes = {"exaone4": {"num_hidden_layers": 2}, "qwen3_next": {"num_hidden_layers": 3}}
    family = "qwen3_next" if kind.endswith(BESIDE_STATES) else kind if kind in shapes else "llama"
    target = write_target(folder / "model", family, **shapes.get(family, {}))
    if kind.startswith("medusa"):
        return target, write_medusa(folder / "head", target, MEDUSA[kind.removesuffix(BESIDE_STATES)])
    head = write_eagle3(
        folder / "head", target, FLAGS[kind], is_speculators=kind == "speculators", has_all_words=kind == "all words"
    )
    return target, head


class Rows:
    """Sequences of an engine, and the tokens that they have. Slots of states take turns; wrong drafts take one back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens = [list(prompt) for prompt in PROMPTS]
        self._num_steps, self._begins = [0, 0], [0, 0]
        for row, prompt in enumerate(PROMPTS):
            engine.rows.open(row, np.array(prompt, np.int32), GREEDY, len(prompt))
            engine.rows.write_pages(row, 0, range(6 * row, 6 * row + 6))

    def ask(self, row: int, count: int, num_logits: int = 0) -> ForwardRow:
        """The next positions."""
        begin, step = self._begins[row], self._num_steps[row]
        self._begins[row], self._num_steps[row] = begin + count, step + 1
        source, target = take_turns(row, step)
        return ForwardRow(row, begin, count, num_logits, state_from=source, state_to=target)

    def prefill(self) -> None:
        """The first prompt in chunks, the second one beside the last of these."""
        for count in (16, 5, 5):
            self.engine.runner.launch([self.ask(0, count)]).collect()
        rest = [self.ask(0, 11, 1), self.ask(1, 18, 1)]
        for own, token in zip(self.tokens, self.engine.runner.launch(rest).collect().tokens, strict=True):
            own.append(token)

    def draft(self) -> list[list[int]]:
        """The head's guesses; their log-probabilities are the truth's."""
        runner, guesses = self.engine.draft_runner, [list[int]() for _ in self.tokens]
        assert isinstance(runner, HeadRunner)
        told = []
        for depth in range(DEPTH):
            asked = [
                ForwardRow(row, len(own) - 1 + depth, 1, 1, chosen_logprobs=NUM_TOP, num_drafted=depth, state_to=0)
                for row, own in enumerate(self.tokens)
            ]
            found = runner.launch(asked).collect()
            told.append(found.logprobs)
            for own, token in zip(guesses, found.tokens, strict=True):
                own.append(token)
        self.told = told
        return guesses

    def check(self, target: Any, head: Head, guesses: list[list[int]]) -> None:
        for row, own in enumerate(self.tokens):
            for depth, truth in enumerate(draft_truth(target, head, own, guesses[row][:-1])):
                one = self.told[depth][row]
                assert one is not None
                best = truth.topk(NUM_TOP)
                assert list(one.top_ids) == best.indices.tolist(), (row, depth)
                assert list(one.top_logprobs) == pytest.approx(best.values.tolist(), abs=2e-4)
                assert guesses[row][depth] == best.indices[0]

    def verify(self, drafts: list[list[int]]) -> list[int]:
        """A step of the model with these drafts. Returns how many were right."""
        asked = []
        for row, (own, known) in enumerate(zip(drafts, self.tokens, strict=True)):
            self.engine.rows.write_tokens([(row, len(known), np.array(own, np.int32))])
            asked.append(self.ask(row, len(known) - self._begins[row] + len(own), 1 + len(own)))
        found, begin, num_right = self.engine.runner.launch(asked).collect(), 0, []
        for row, (own, known) in enumerate(zip(drafts, self.tokens, strict=True)):
            chosen = found.tokens[begin : begin + len(own)]
            accepted = next((at for at, pair in enumerate(zip(own, chosen, strict=True)) if len({*pair}) > 1), len(own))
            known += found.tokens[begin : begin + accepted + 1]
            begin += 1 + len(own)
            num_right.append(accepted)
            self._begins[row] = len(known) - 1
            if accepted < len(own) and self.engine.states is not None:
                self._begins[row], self._num_steps[row] = asked[row].begin, self._num_steps[row] - 1
        return num_right


@pytest.mark.parametrize(
    "kind", [*FLAGS, *others(MTP, "glm4_moe_lite", "qwen3_5_text"), *MEDUSA, "medusa" + BESIDE_STATES]
)
def test_a_head_drafts_what_plain_torch_computes(tmp_path: Path, kind: str) -> None:
    target, head = write_head(tmp_path, kind)
    engine = build(tmp_path / "model", head.draft_model)
    rows = Rows(engine)
    rows.prefill()
    with torch.inference_mode():
        greedy = [target(input_ids=torch.tensor([own[:-1]])).logits[0, -1].argmax() for own in rows.tokens]
    assert [own[-1] for own in rows.tokens] == greedy
    guesses = rows.draft()
    rows.check(target, head, guesses)
    assert rows.verify(guesses) != [DEPTH, DEPTH]  # a random head
    rows.check(target, head, rows.draft())
    right = [
        target.generate(torch.tensor([own]), max_new_tokens=2, do_sample=False)[0, -2:].tolist() for own in rows.tokens
    ]
    assert rows.verify([right[0], [right[1][0], (right[1][1] + 1) % VOCAB]]) == [2, 1]
    rows.check(target, head, rows.draft())
    rows.verify([[], []])
    rows.check(target, head, rows.draft())


def test_heads_whose_words_do_not_fit_are_refused(tmp_path: Path) -> None:
    head = write_eagle3(tmp_path / "head", write_target(tmp_path / "model"))
    folder, model = Path(head.draft_model), load_config(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": DRAFT_VOCAB - 1}))
    with pytest.raises(ValueError, match=f"2 ranks do not divide draft_vocab_size {DRAFT_VOCAB - 1}: set --tp"):
        shard_config(read_head(folder, model, is_mtp=False), Shard(0, 2))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]  # the model's has other words
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"lm_head\.weight is missing, for draft_vocab_size {DRAFT_VOCAB}"):
        build(tmp_path / "model", head.draft_model)


@pytest.mark.parametrize(
    ("layout", "changes", "expected"),
    [
        ("medusa", {"medusa_num_heads": 0}, "medusa_num_heads must be an integer from 1"),
        ("medusa", {"medusa_num_heads": 10**9}, "medusa_num_heads is 1000000000, expected at most 16"),
        ("medusa", {"medusa_num_layers": 99}, "medusa_num_layers is 99, expected at most 16"),
        ("medusa", {"medusa_num_layers": None}, "medusa_num_layers must be an integer"),
        ("medusa", {"medusa_num_heads": 2}, r"unexpected: blocks\.2\.0\.weight"),
        ("medusa", {"medusa_num_heads": 4}, r"missing: blocks\.3\.0\.weight"),
        ("medusa of vllm", {"hidden_size": 32}, "hidden_size is 32, the model's 64"),
        ("medusa of vllm", {"vocab_size": 7}, f"vocab_size is 7, the model's {VOCAB}"),
        ("medusa of vllm", {"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ("medusa of vllm", {"original_lm_head": "yes"}, "original_lm_head must be true or false"),
        ("medusa of vllm", {"logit_scale": 0}, "logit_scale must be a number above 0"),
        ("medusa of vllm", {"truncated_vocab_size": 5}, r"mis-shaped: lm_heads\.0\.weight"),
        ("medusa of vllm", {"truncated_vocab_size": 10**6}, "truncated_vocab_size is 1000000, more than the model's"),
        ("medusa of vllm, words", {"truncated_vocab_size": None}, r"mis-shaped: lm_heads\.0\.weight"),
        ("medusa of the model's lm_head", {"model_type": "medusa", "truncated_vocab_size": 9}, "lm_heads are missing"),
    ],
)
def test_medusa_configs_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, layout: str, changes: dict[str, Any], expected: str
) -> None:
    head = write_medusa(tmp_path / "head", write_target(tmp_path / "model"), MEDUSA[layout])
    path = Path(head.draft_model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=expected):
        build(tmp_path / "model", head.draft_model)


def test_a_token_map_is_of_the_models_tokens(tmp_path: Path) -> None:
    head = write_medusa(tmp_path / "head", write_target(tmp_path / "model"), MEDUSA["medusa of vllm, words"])
    path = Path(head.draft_model) / "model.safetensors"
    tensors = load_file(path)
    for words in (tensors["token_map"] + VOCAB, tensors["token_map"][1:]):
        save_file(tensors | {"token_map": words.contiguous()}, path)
        with pytest.raises(ValueError, match=f"token_map does not give {DRAFT_VOCAB} of the model's {VOCAB} tokens"):
            build(tmp_path / "model", head.draft_model)


def test_pickled_medusa_heads_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write_target(tmp_path / "model")
    write_tokenizer(tmp_path / "model", VOCAB)
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    (folder / "medusa_lm_head.pt").write_bytes(b"x")
    expected = r"medusa_lm_head\.pt is a pickle, which is not read: save it as safetensors where it was trained"
    with pytest.raises(ValueError, match=expected):
        build(tmp_path / "model", str(folder))
    with pytest.raises(ConfigError, match=expected):
        check_models(str(tmp_path / "model"), str(folder))
    (folder / "medusa_lm_head.pt").unlink()
    with pytest.raises(ValueError, match=r"medusa_lm_head\.safetensors is not there: save it as safetensors"):
        build(tmp_path / "model", str(folder))


def test_a_model_that_was_trained_with_its_heads_has_them_in_its_folder(tmp_path: Path) -> None:
    """Medusa-2."""
    folder = tmp_path / "model"
    head = write_medusa(tmp_path / "head", write_target(folder))
    (Path(head.draft_model) / WEIGHTS).rename(folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 3, "medusa_num_layers": 1}))
    engine = build(folder, str(folder))
    assert engine.draft_runner is not None and engine.draft_runner.most_drafts == 3
    assert engine.weights != engine.draft_weights
    headers = read_headers(folder, folder, "auto", "auto", "none")
    assert headers.file_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_medusa_heads_have_their_models_format(tmp_path: Path, quantization: Quantization) -> None:
    """With packed weights: nearly what plain torch computes."""
    target = write_target(tmp_path / "model")
    head = write_medusa(tmp_path / "head", target)
    engine = build_engine(
        str(tmp_path / "model"), head.draft_model, "bfloat16", "cpu", 1, 16, 4, lambda *_: (40, 8), lambda *_: None, 96,
        quantization,
    )  # fmt: skip
    rows = Rows(engine)
    rows.prefill()
    rows.draft()
    for row, own in enumerate(rows.tokens):
        told = rows.told[0][row]
        assert told is not None
        truth = draft_truth(target, head, own, [])[0]
        assert list(told.top_logprobs) == pytest.approx(truth[list(told.top_ids)].tolist(), abs=0.5)


def test_doctor_knows_that_medusa_heads_take_no_pages(tmp_path: Path) -> None:
    target = write_target(tmp_path / "model")
    write_tokenizer(tmp_path / "model", VOCAB)
    plain, medusa = (
        examine_model(
            ServeConfig(model=(str(tmp_path / "model"),), draft_model=draft, device="cpu"), str(tmp_path / "model")
        )
        for draft in ("none", write_medusa(tmp_path / "head", target).draft_model)
    )
    assert medusa.parts == plain.parts and medusa.weight_bytes > plain.weight_bytes
