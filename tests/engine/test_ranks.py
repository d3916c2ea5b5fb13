"""A model divided among ranks: each rank chooses the tokens of a single process and has its share of the weights."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.paths import TARGET_DIR
from engine.models.config import ModelConfig, load_config
from engine.models.table import build_table, shard_config
from engine.ranks import Ranks
from engine.weights.checkpoint import Checkpoint
from engine.weights.reader import Reader
from engine.weights.table import Axis, Product, Shard
from tests.support import rank_process
from tests.support.checkpoints import write_checkpoint
from tests.support.threads import on_one_thread

RUN_S = 240
CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "num_heads": 8, "num_kv_heads": 4},
    "qwen2": {"num_heads": 4, "num_kv_heads": 2, "tied": True},
    "qwen3": {"num_heads": 4, "num_kv_heads": 1},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        write_checkpoint(tmp_path_factory.mktemp(family), family, head_dim=16, hidden=64, **settings)
        for family, settings in FAMILIES.items()
    ]


def run_ranks(models: Sequence[Path], folder: Path, size: int) -> list[list[list[list[list[int]]]]]:
    """The tokens chosen by each of `size` processes, without and with graphs, model by model."""
    command = [sys.executable, "-m", "tests.support.rank_process", str(folder / f"meet-{size}")]
    processes = [
        subprocess.Popen([*command, str(rank), str(size), *map(str, models)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    told = [process.communicate(timeout=RUN_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size
    return [json.loads(text.splitlines()[-1]) for text in told]


def test_every_rank_chooses_the_tokens_of_one_process(models: Sequence[Path], tmp_path: Path) -> None:
    """Of two. For four see test_rank_pairs.py."""
    with on_one_thread():
        alone = [rank_process.run(model, Ranks()) for model in models]
    assert run_ranks(models, tmp_path, 2) == [[alone] * 2] * 2


@pytest.mark.parametrize("which", range(len(FAMILIES)), ids=list(FAMILIES))
def test_the_shards_together_are_the_model(models: Sequence[Path], which: int) -> None:
    config, whole = load_config(models[which]), Checkpoint(models[which])
    for size in (2, 4):
        readers = [Reader(whole, torch.float32, CPU, lambda *_: None, Shard(rank, size)) for rank in range(size)]
        repeats = max(1, size // config.num_kv_heads)  # ranks with the same KV head
        for product in list_products(config):
            weights = [reader.weights(product) for reader in readers]
            biases = [reader.biases(product) for reader in readers]
            for index, part in enumerate(product.parts):
                every = repeats if part.module.endswith(("k_proj", "v_proj")) else 1
                axis = 1 if product.inputs.is_divided else 0
                together = torch.cat([own[index] for own in weights[::every]], axis)
                assert torch.equal(together, whole.tensor(f"{part.module}.weight")), part
                if product.has_bias:
                    added = [own[index] for own in biases[::every] if own]
                    assert torch.equal(torch.cat(added), whole.tensor(f"{part.module}.bias")), part


def list_products(config: ModelConfig) -> list[Product]:
    table = build_table(config)
    products = [table.embedding] if config.is_tied else [table.embedding, table.lm_head]
    for one in table.layers:
        products += [one.qkv_proj, one.o_proj, one.gate_up_proj, one.down_proj]
    return products


def test_ranks_have_heads_that_belong_together() -> None:
    base = load_config_like(num_heads=32, num_kv_heads=8)
    heads = Axis(base.num_kv_heads)
    assert [list(heads.of(Shard(rank, 4))) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [heads.of(Shard(rank, 16)).start for rank in range(16)] == [rank // 2 for rank in range(16)]
    own = shard_config(base, Shard(1, 16))
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size) == (2, 1, base.intermediate_size // 16)


@pytest.mark.parametrize(
    ("change", "size", "said"),
    [
        ({"num_heads": 6}, 4, "num_heads 6"),
        ({"intermediate_size": 255}, 2, "intermediate_size 255"),
        ({"vocab_size": 321}, 2, "vocab_size 321"),
        ({"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 256}, 4, "3 KV heads"),
    ],
)
def test_what_cannot_be_divided_is_told(change: dict[str, int], size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shard_config(load_config_like(**change), Shard(0, size))


def load_config_like(**change: int) -> ModelConfig:
    return replace(load_config(TARGET_DIR), **change)  # type: ignore[arg-type]
