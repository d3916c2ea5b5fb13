"""Engines are built from a checkpoint and settings; bad ones are refused before any large allocation."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from baton import LLM
from demo.paths import TARGET_DIR
from engine.batch import ForwardRow
from engine.compose import FullEngine, build_engine
from engine.engine import KvDType
from engine.input_batch import InputBatch
from engine.layer_config import RopeConfig
from engine.layers.rope import build_rope_table
from engine.prepared import lay_out
from kvtransfer.layout import find_mismatch
from runtime.config import DecodeConfig
from runtime.trust import load_trust
from tests.support.checkpoints import write_checkpoint
from tests.support.families import LONGROPE_ORIGINAL
from tests.support.lora import greedy
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams
from worker.process import build_worker

PROMPT = np.arange(20, 120, dtype=np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Context length |-> checkpoint."""
    return {
        context: write_checkpoint(tmp_path_factory.mktemp(str(context)), "llama", layers=1, context=context)
        for context in (64, 256)
    }


def build(model: Path, draft: Path | str, max_context_tokens: int) -> FullEngine:
    return build_engine(
        str(model), str(draft), "float32", "cpu", 1, 16, 4, lambda *_: (4, 0),
        lambda _done, _total: None,
        max_context_tokens,
    )  # fmt: skip


@pytest.mark.parametrize(("target", "max_context_tokens"), [(256, 64), (256, 16), (64, 0)])
def test_a_draft_needs_only_the_context_in_use(folders: dict[int, Path], target: int, max_context_tokens: int) -> None:
    engine = build(folders[target], folders[64], max_context_tokens)
    assert engine.draft_runner is not None
    assert engine.rows.context_tokens == engine.config.context_tokens == (max_context_tokens or target)


@pytest.mark.parametrize(("max_context_tokens", "context"), [(0, 256), (65, 65), (256, 256), (1000, 256)])
def test_a_draft_of_a_smaller_context_is_refused(
    folders: dict[int, Path], max_context_tokens: int, context: int
) -> None:
    said = f"takes 64 tokens, less than a context of {context}: set --max-context-tokens 64 or less"
    with pytest.raises(ValueError, match=said):
        build(folders[256], folders[64], max_context_tokens)


def test_rope_tables_are_as_long_as_the_context_in_use(folders: dict[int, Path], monkeypatch: Any) -> None:
    built: list[int] = []

    def build_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
        built.append(num_positions)
        return build_rope_table(rope, head_dim, num_positions)

    monkeypatch.setattr("engine.layers.rope.build_rope_table", build_table)
    build(folders[256], folders[256], 40)
    assert built == [40 + MAX_DRAFT_TOKENS] * 2  # drafts may follow a sequence at its limit


def test_longrope_has_the_factors_of_the_context_in_use(tmp_path: Path) -> None:
    """Short ones up to the original context, where tokens are those of transformers; beyond it long ones for all."""
    folder = write_checkpoint(tmp_path, "phi4_mini")
    prompt = PROMPT[: LONGROPE_ORIGINAL - 12]
    theirs = transformers.Phi3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = greedy(theirs, prompt.tolist(), 12)
    short, long = (build(folder, "", context) for context in (LONGROPE_ORIGINAL, LONGROPE_ORIGINAL + 1))
    assert answer(short, prompt, 12) == expected != answer(long, prompt, 12)
    assert short.weights == f"{long.weights}:short-rope", "they share no KV"
    (weakness,) = long.find_weaknesses().values()
    assert "--max-context-tokens 32" in weakness and not short.find_weaknesses()


def answer(engine: FullEngine, prompt: Any, count: int) -> list[int]:
    """Greedy tokens."""
    rows, tokens = engine.rows, list[int]()
    rows.open(0, prompt, SamplingParams(temperature=0.0), len(prompt))
    rows.write_pages(0, 0, range(3))
    for _ in range(count):
        begin = len(prompt) + len(tokens) - 1 if tokens else 0
        asked = ForwardRow(0, begin, len(prompt) + len(tokens) - begin, 1)
        tokens += engine.runner.launch([asked]).collect().tokens
    rows.close(0)
    return tokens


def test_a_draft_of_another_vocabulary_is_refused(folders: dict[int, Path], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", layers=1, vocab=300)
    with pytest.raises(ValueError, match="its vocab_size is 300, the model's 320"):
        build(folders[64], other, 0)


def test_a_config_that_is_no_object_is_told(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", layers=1)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json holds a list, not a JSON object"):
        build(folder, "", 0)


def score_prompt(kv_dtype: KvDType) -> tuple[FullEngine, torch.Tensor]:
    """The demo model and the log-probabilities of PROMPT's tokens, computed in two steps: the second reads pages."""
    engine = build_engine(
        str(TARGET_DIR), "", "float32", "cpu", 1, 16, 1, lambda *_: (8, 0), lambda _done, _total: None,
        128, kv_dtype=kv_dtype,
    )  # fmt: skip
    engine.rows.open(0, PROMPT, SamplingParams(), len(PROMPT))
    engine.rows.write_pages(0, 0, range(8))
    told = []
    for begin, count in ((0, 50), (50, 49)):
        step = engine.runner.launch([ForwardRow(0, begin, count, num_logits=count, num_given=count)]).collect()
        told += [one.logprob for one in step.logprobs if one is not None]
    return engine, torch.tensor(told)


def test_fp8_pages_hold_a_quarter_of_the_bytes_at_little_loss() -> None:
    (plain, truth), (rounded, near) = score_prompt("auto"), score_prompt("fp8")
    assert rounded.pool.page_bytes * 4 == plain.pool.page_bytes
    assert rounded.attention.is_fallback and "float8_e4m3fn" in rounded.attention.reason
    error = (near - truth).abs().mean().item()
    assert 1e-4 < error < 0.2

    async def present(engine: FullEngine) -> str | None:
        config = DecodeConfig()
        ours, theirs = (
            build_worker("decode", config, one, "localhost:1", load_trust(config), "D1").me.layout
            for one in (plain, engine)
        )
        return find_mismatch(ours, theirs)

    said = "dtype differs: 'float32' here, 'float8_e4m3fn of float32' there"
    assert asyncio.run(present(rounded)) == said and asyncio.run(present(plain)) is None


async def test_models_of_two_number_types_share_no_file_of_states(tmp_path: Path) -> None:
    """Slots are float32 in both."""
    folder, config = write_checkpoint(tmp_path / "model", "lfm2"), DecodeConfig(kv_disk=str(tmp_path / "kv"))
    for dtype in ("float32", "bfloat16"):
        engine = build_engine(
            str(folder), "", dtype, "cpu", 1, 16, 4, lambda *_: (8, 8), lambda _done, _total: None, 64
        )  # fmt: skip
        worker = build_worker("decode", config, engine, "localhost:1", load_trust(config), "D1")
        for pool in worker.pools:
            pool.tiers.close()
    assert len(list((tmp_path / "kv").iterdir())) == 4


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


def test_answers_in_order_and_as_alone() -> None:
    llm = LLM(str(TARGET_DIR), max_running=2, context_tokens=128)
    questions = ["What is 12 plus 30?", "What is the capital of France?", "What is 3 plus 4?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    template: Any = llm.tokenizer.apply_chat_template
    prompts = [template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    answers = llm.generate(prompts, max_tokens=40)
    for answer, word in zip(answers, ("42", "Paris", "7"), strict=True):
        assert word in answer
    assert [llm.generate([prompt], max_tokens=40)[0] for prompt in prompts] == answers
    assert len(llm._free_pages) == llm.engine.num_pages and len(llm._free_rows) == 2
    with pytest.raises(ValueError, match="a prompt of 1 tokens and 128 of the answer"):
        llm.generate([[5]])
