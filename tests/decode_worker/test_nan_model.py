"""If a model computes NaN, its requests fail with a reason; if a draft model does, only its drafts are lost."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from decode_worker.speculation.drafters import ModelDrafter, NgramDrafter
from decode_worker.speculation.lengths import CostMeter
from demo.paths import TARGET_DIR
from engine.engine import Engine, build_engine
from tests.support.decoding import build_eager_speculator, decode
from tests.support.grammars import compile_here, vocabulary
from tests.support.real_workers import packed
from wire.sampling import SamplingParams
from worker.sequences import SequenceParams

PROMPT = [1, 50, 60, 50, 60, 50, 60, 50]


def build(model: Path, draft: Path | str) -> Engine:
    return build_engine(
        str(model), str(draft), "float32", "cpu", 1, 16, 16, lambda *_: (60, 0), lambda _done, _total: None
    )


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with NaN in its last norm."""
    folder = tmp_path_factory.mktemp("nan") / "model"
    shutil.copytree(TARGET_DIR, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def requests() -> list[SequenceParams]:
    grammar = compile_here("regex", "[a-z]{3,20}", vocabulary())
    asked: list[dict[str, Any]] = [
        {}, {"grammar": grammar}, {"num_logprobs": 3}, {"sampling": SamplingParams(seed=3, top_p=0.9)},
        {"min_tokens": 5, "stop_token_ids": frozenset({2})}, {"drafter": "ngram", "max_draft_tokens": 4},
        {"grammar": grammar, "sampling": SamplingParams(repetition_penalty=1.5)},
    ]  # fmt: skip
    greedy: dict[str, Any] = {"sampling": SamplingParams(temperature=0.0)}
    return [
        SequenceParams(str(handle), packed(PROMPT), len(PROMPT) - 1, 20, handle=handle, **{**greedy, **fields})
        for handle, fields in enumerate(asked, start=1)
    ]


def test_every_request_fails_with_the_reason(broken: Path) -> None:
    wanted = requests()
    answers = decode(build(broken, ""), wanted, build_eager_speculator({"ngram": NgramDrafter()}))
    assert not any(answers.tokens.values()) and not any(answers.logprobs.values())
    assert {end.finish_reason for end in answers.ends.values()} == {"error"}
    assert all("the model's logits are NaN" in end.error for end in answers.ends.values())


def test_a_broken_draft_model_changes_no_token(broken: Path) -> None:
    engine = build(TARGET_DIR, broken)
    assert engine.draft_runner is not None
    wanted = [replace(one, drafter="draft", max_draft_tokens=3) for one in requests()]
    drafter = ModelDrafter(engine.draft_runner, CostMeter(), 64)
    with capture_logs() as logs:
        drafted = decode(engine, wanted, build_eager_speculator({"draft": drafter}))
    assert [event["event"] for event in logs].count("speculation failed") == 1
    assert drafted.tokens == decode(engine, wanted).tokens
    assert {end.finish_reason for end in drafted.ends.values()} <= {"stop", "length"}
