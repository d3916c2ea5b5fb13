"""Speculation changes no token: all samplings, in mixed batches, with every drafter, or one whose model gives NaN."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from decode_worker.speculation.drafters import Drafter, ModelDrafter, NgramDrafter
from decode_worker.speculation.lengths import CostMeter
from demo.paths import TARGET_DIR
from engine.compose import build_engine
from engine.engine import Engine
from gateway.text.tokenizer import Tokenizer
from tests.support.combinations import combination
from tests.support.decoding import LyingDrafter, build_eager_speculator, decode
from tests.support.grammars import compile_here, vocabulary
from tests.support.real_workers import packed
from wire.sampling import SamplingParams
from worker.params import SequenceParams
from worker.startup.models import locate_draft, locate_model

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ("What is 12 plus 30?", "Tell me a story about a fox and a fox and a fox.", "abc abc abc abc", "1 2 3 4 5 6")
GRID = {
    "greedy": GREEDY,
    "plain": SamplingParams(seed=1),
    "hot": SamplingParams(temperature=1.7, seed=2),
    "cool": SamplingParams(temperature=0.3, seed=3),
    "top_p": SamplingParams(temperature=0.9, top_p=0.8, seed=4),
    "top_k": SamplingParams(temperature=1.2, top_k=5, seed=5),
    "min_p": SamplingParams(temperature=1.2, min_p=0.1, seed=6),
    "all filters": SamplingParams(temperature=1.1, top_p=0.9, top_k=20, min_p=0.02, seed=7),
    "frequency": SamplingParams(temperature=0.8, frequency_penalty=1.5, seed=8),
    "presence": SamplingParams(temperature=0.8, presence_penalty=1.5, seed=9),
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=10),
    "greedy penalties": replace(GREEDY, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.1),
    "bias": SamplingParams(temperature=0.7, logit_bias=((30, 4.0), (31, -100.0), (40, 2.0)), seed=11),
    "everything": SamplingParams(
        temperature=1.0, top_p=0.95, top_k=50, min_p=0.01, seed=12, frequency_penalty=0.3, presence_penalty=0.2,
        repetition_penalty=1.05, logit_bias=((50, 1.5),),
    ),
}  # fmt: skip


def build(draft_model: str, num_pages: int, model: str = "demo") -> Engine:
    return build_engine(
        locate_model(model), draft_model, "float32", "cpu", 1, 16, 128,
        lambda *_: (num_pages, 0), lambda _done, _total: None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build(locate_draft("demo", "auto"), 600)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(locate_model("demo")))


def build_params(tokenizer: Tokenizer, text: str, handle: int, max_tokens: int, **others: Any) -> SequenceParams:
    prompt = tokenizer.encode(text, add_special_tokens=True)
    packed = np.array(prompt, np.int32).tobytes()
    return SequenceParams(str(handle), packed, len(prompt) - 1, max_tokens, gateway="g", handle=handle, **others)


def build_requests(tokenizer: Tokenizer, drafter: str) -> list[SequenceParams]:
    """All samplings over all prompts, some with stop tokens, minimum lengths and log-probabilities."""
    return [
        build_params(
            tokenizer, PROMPTS[number % len(PROMPTS)], number + 1, 24 + number, sampling=sampling,
            stop_token_ids=tokenizer.eos_token_ids if number % 2 else frozenset(),
            min_tokens=12 if number % 3 == 0 else 0, num_logprobs=3 if number % 4 == 0 else None, drafter=drafter,
            max_draft_tokens=1 + number % 8,
        )
        for number, sampling in enumerate(GRID.values())
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["ngram", "draft", "lying"])
def test_answers_with_drafts_are_those_without(engine: Engine, tokenizer: Tokenizer, name: str) -> None:
    plain = decode(engine, build_requests(tokenizer, "off"))
    assert engine.draft_runner is not None
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(),
        "draft": ModelDrafter(engine.draft_runner, CostMeter(), 64),
        "lying": LyingDrafter(plain.tokens, 1024),
    }
    drafted = decode(engine, build_requests(tokenizer, name), build_eager_speculator({name: drafters[name]}))
    assert drafted.tokens == plain.tokens
    for handle, end in plain.ends.items():
        assert drafted.ends[handle].finish_reason == end.finish_reason
        told, expected = drafted.logprobs[handle], plain.logprobs[handle]
        assert [one.top_ids for one in told] == [one.top_ids for one in expected]
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    timings = [end.timing for end in drafted.ends.values() if end.timing is not None]
    assert len(timings) == len(GRID)
    num_drafted, num_accepted = sum(one.draft_tokens for one in timings), sum(one.accepted_tokens for one in timings)
    assert num_drafted > 50 and 0 < num_accepted < num_drafted, (num_drafted, num_accepted)
    assert sum(one.steps for one in timings) < sum(len(tokens) for tokens in plain.tokens.values())


@pytest.mark.parametrize("num_pages", [combination(600), 32], ids=["long prompts", "preemption"])
def test_a_draft_model_equal_to_the_model_is_always_right(tokenizer: Tokenizer, num_pages: int) -> None:
    """Any missing KV, after chunked prefill, shorter drafts or preemption, would make it wrong."""
    engine = build(locate_model("demo"), num_pages)
    assert engine.draft_runner is not None
    wanted = build_requests(tokenizer, "draft")
    is_tight = num_pages == 32
    if is_tight:
        wanted = [replace(one, max_tokens=60, stop_token_ids=frozenset()) for one in wanted]
    else:
        long = " ".join(PROMPTS * 8)  # several chunks
        wanted += [
            build_params(tokenizer, long[i:], 100 + i, 24, sampling=GREEDY, drafter="draft", max_draft_tokens=5)
            for i in range(3)
        ]
    drafter = ModelDrafter(engine.draft_runner, CostMeter(), 64)
    answers = decode(engine, wanted, build_eager_speculator({"draft": drafter}))
    assert answers.tokens == decode(engine, [replace(one, drafter="off") for one in wanted]).tokens
    timings = [end.timing for end in answers.ends.values() if end.timing is not None]
    assert sum(one.draft_tokens for one in timings) > 100
    for handle, end in answers.ends.items():
        assert end.timing is not None
        if end.finish_reason == "length":  # drafts after a stop token are dropped
            assert end.timing.accepted_tokens == end.timing.draft_tokens, handle
    assert any(one.preemptions for one in timings) == is_tight


PROMPT = [1, 50, 60, 50, 60, 50, 60, 50]


# -- models that compute NaN -------------------------------------------------------------------------------------------


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


def test_every_request_of_a_broken_model_fails_with_the_reason(broken: Path) -> None:
    wanted = requests()
    answers = decode(build("", 60, str(broken)), wanted, build_eager_speculator({"ngram": NgramDrafter()}))
    assert not any(answers.tokens.values()) and not any(answers.logprobs.values())
    assert {end.finish_reason for end in answers.ends.values()} == {"error"}
    assert all("the model's logits are NaN" in end.error for end in answers.ends.values())


def test_a_broken_draft_model_changes_no_token(broken: Path) -> None:
    engine = build(str(broken), 60)
    assert engine.draft_runner is not None
    wanted = [replace(one, drafter="draft", max_draft_tokens=3) for one in requests()]
    drafter = ModelDrafter(engine.draft_runner, CostMeter(), 64)
    with capture_logs() as logs:
        drafted = decode(engine, wanted, build_eager_speculator({"draft": drafter}))
    assert [event["event"] for event in logs].count("speculation failed") == 1
    assert drafted.tokens == decode(engine, wanted).tokens
    assert {end.finish_reason for end in drafted.ends.values()} <= {"stop", "length"}
