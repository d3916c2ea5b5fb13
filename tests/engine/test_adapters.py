"""Adapters (LoRA) behind products: the merged model's tokens, in one batch with others and with the base."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import ForwardRow, take_turns
from engine.engine import Engine, build_engine
from engine.layers.adapters import AdapterLimits
from tests.support.checkpoints import write_checkpoint
from tests.support.families import VOCAB
from tests.support.lora import greedy, write_adapter
from wire.sampling import SamplingParams

PROMPTS = [
    torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (40, 7, 19)
]
LIMITS, PAGE = AdapterLimits(3, 8), 16
COUNT = 8


def build(folder: Path, dtype: str = "float32", limits: AdapterLimits = LIMITS, **options: Any) -> Engine:
    return build_engine(
        str(folder), "", dtype, "cpu", 2, PAGE, 4, lambda *_: (64, 8), lambda done, total: None,
        adapter_limits=limits, **options,
    )  # fmt: skip


def answer(engine: Engine, slots: list[int], count: int = COUNT) -> list[list[int]]:
    """Greedy answers to PROMPTS in one batch, each with the adapter of its slot."""
    rows, answers = engine.rows, [list[int]() for _ in slots]
    for row, (prompt, slot) in enumerate(zip(PROMPTS, slots, strict=False)):
        rows.open(row, np.array(prompt, np.int32), SamplingParams(temperature=0), len(prompt), slot)
        rows.write_pages(row, 0, list(range(8 * row, 8 * row + 8)))
    for step in range(count):
        asked = []
        for row, own in enumerate(answers):
            length = len(PROMPTS[row]) + len(own)
            begin = length - 1 if own else 0
            source, target = take_turns(row, step)
            asked.append(ForwardRow(row, begin, length - begin, 1, state_from=source, state_to=target))
        for own, token in zip(answers, engine.runner.launch(asked).collect().tokens, strict=True):
            own.append(token)
    for row in range(len(slots)):
        rows.close(row)
    return answers


def load(engine: Engine, slot: int, folder: Path) -> None:
    assert engine.adapters is not None and engine.read_adapter is not None
    engine.adapters.hosted[folder.name] = engine.read_adapter(folder)
    engine.rows.fill_slot(slot, folder.name)


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "glm", "qwen3_moe", "gemma4_e2b", "qwen3_5_text", "gpt_oss", "lfm2"]
)
def test_each_row_has_its_own_adapter_or_none(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family)
    merged = [
        write_adapter(tmp_path / "one", base, family, seed=1, r=4, lora_alpha=8),
        write_adapter(tmp_path / "two", base, family, seed=2, r=8, lora_alpha=6, use_rslora=True),
    ]
    engine, plain = build(base), build(base, limits=AdapterLimits(0, 1))
    load(engine, 0, tmp_path / "one")
    load(engine, 2, tmp_path / "two")
    expected = [greedy(merged[0], PROMPTS[0], COUNT), greedy(merged[1], PROMPTS[1], COUNT), answer(plain, [-1] * 3)[2]]
    assert answer(engine, [0, 2, -1]) == expected
    assert answer(engine, [-1] * 3) == answer(plain, [-1] * 3)
    load(engine, 0, tmp_path / "two")
    assert answer(engine, [0]) == [greedy(merged[1], PROMPTS[0], COUNT)]
