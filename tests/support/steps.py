"""All samplings, each with its own prompt, and the steps that answer them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import ForwardRow
from engine.compose import load_model
from engine.input_batch import InputBatch
from engine.models.decoder import Decoder
from engine.runner import Runner
from tests.support.batches import SAMPLINGS
from tests.support.checkpoints import write_checkpoint
from wire.kv_layout import pool_sizes

CPU = torch.device("cpu")
VOCAB, PAGE_TOKENS, CONTEXT, ROW_PAGES, NUM_TOKENS = 300, 16, 64, 5, 16
PROMPTS = [np.random.default_rng(row).integers(2, VOCAB, 3 + 3 * row, np.int32) for row in range(len(SAMPLINGS))]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Without what only a CPU has."""
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("model"), "llama", vocab=VOCAB, hidden=64, head_dim=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        return load_model(folder, "auto", CPU)


def build_pages(decoder: Decoder) -> torch.Tensor:
    config = decoder.config
    sizes = pool_sizes(
        num_pages=len(SAMPLINGS) * ROW_PAGES, num_kv_heads=config.num_kv_heads, num_layers=config.num_layers,
        page_tokens=PAGE_TOKENS, head_dim=config.head_dim,
    )  # fmt: skip
    return torch.zeros(sizes)


def open_row(rows: InputBatch, row: int, which: int) -> None:
    """The `which`-th prompt, with its sampling."""
    rows.open(row, PROMPTS[which], SAMPLINGS[which], len(PROMPTS[which]))
    rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))


def plan(step: int, rows: Sequence[int], which: Sequence[int]) -> list[ForwardRow]:
    """The prompt, then one token at a time."""
    lengths = [len(PROMPTS[one]) for one in which]
    if step == 0:
        return [ForwardRow(row, 0, length, 1) for row, length in zip(rows, lengths, strict=True)]
    return [ForwardRow(row, length + step - 1, 1, 1) for row, length in zip(rows, lengths, strict=True)]


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[list[int]]:
    """Each answer, step by step, computed alone."""
    answers = []
    for which in range(len(SAMPLINGS)):
        rows = InputBatch(len(SAMPLINGS), CONTEXT, PAGE_TOKENS, VOCAB, CPU)
        runner = Runner(decoder, TorchSdpaAttention(decoder.config.attention_shapes[0]), build_pages(decoder), rows)
        open_row(rows, 0, which)
        steps = range(NUM_TOKENS)
        answers.append([runner.launch(plan(step, [0], [which])).collect().tokens[0] for step in steps])
    return answers


class Unwatched(TorchSdpaAttention):
    """Runs operations that depend on lengths, as GPU backends must not; its output tensors keep their addresses."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._outs: dict[tuple[int, int], Tensor] = {}  # (layer, tokens) |-> [T, Hq, D]

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "Unwatched":
        return self

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        with _disable_current_modes():
            attended = super().attend(layer, heads, window, sinks)
            return self._outs.setdefault((layer, len(attended)), attended).copy_(attended)
