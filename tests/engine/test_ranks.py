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
from engine.models.config import ModelConfig
from engine.models.read_config import load_config
from engine.models.table import build_table, shard_config
from engine.ranks import Ranks
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.reader import ShardReader
from engine.weights.table import Product, Shard
from tests.support import rank_process
from tests.support.checkpoints import write_checkpoint
from tests.support.threads import on_one_thread

RUN_S = 240
CPU = torch.device("cpu")
SMALL = {"head_dim": 16, "hidden": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"attention_bias": True, "mlp_bias": True, "num_heads": 8, "num_kv_heads": 4},
    "qwen2": SMALL | {"num_heads": 4, "num_kv_heads": 2, "tied": True},
    "qwen3": SMALL | {"num_heads": 4, "num_kv_heads": 1},
    "gemma3_text": {},  # norms after blocks
    "gemma4_26b_a4b": {},  # experts beside MLPs, one KV head for both ranks in full layers
    "gemma4_e2b": {},  # shared keys and values, inputs per layer
    "glm4_moe": {},  # dense layers, mixtures with a shared expert
    "gpt_oss": {},  # sinks, biases of experts
    "olmo3": {},  # norms over all heads of all ranks
    "phi3": {},  # packed weights
    "qwen3_moe": {},
    "qwen3_5_moe": {"num_kv_heads": 1},  # states, gates beside queries, a shared expert with a gate
    "lfm2_moe": {},  # states, biases of convolutions
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        write_checkpoint(tmp_path_factory.mktemp(family), family, **settings) for family, settings in FAMILIES.items()
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
    config, checkpoint = load_config(models[which]), SafetensorsCheckpoint(models[which])
    products = [one for one in build_table(config).weights() if isinstance(one, Product)]
    products = [one for one in products if next(one.stored()).name in checkpoint.entries]  # a tied head may be missing

    def read(rank: int, size: int) -> ShardReader:
        return ShardReader(checkpoint, torch.float32, CPU, lambda *_: None, Shard(rank, size))

    whole = read(0, 1)
    for size in (2, 4):
        readers = [read(rank, size) for rank in range(size)]
        for product in products:
            weights = [reader.weights(product) for reader in readers]
            biases = [reader.biases(product) for reader in readers]
            axis = 1 if product.inputs.is_divided else 0
            for index, (part, expected) in enumerate(zip(product.parts, whole.weights(product), strict=True)):
                if axis == 0 and not part.rows.is_divided:
                    assert all(torch.equal(own[index], expected) for own in weights), part
                    continue
                every = max(1, size // part.rows.count) if axis == 0 else 1  # ranks with the same KV head
                assert torch.equal(torch.cat([own[index] for own in weights[::every]], axis), expected), part
                if part.bias is not None:
                    added = [own[index] for own in biases[::every] if own]
                    assert torch.equal(torch.cat(added), whole.biases(product)[index]), part


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        ({"num_heads": 6}, 4, "num_heads 6"),
        ({"intermediate_size": 255}, 2, "intermediate_size 255"),
        ({"vocab_size": 321}, 2, "vocab_size 321"),
        ({"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 256}, 4, "3 KV heads"),
        ("qwen3_5_moe", 4, "linear_num_key_heads 2"),
        ("lfm2_moe", 8, "num_heads 4"),
    ],
)
def test_what_cannot_be_divided_is_told(
    models: Sequence[Path], model: str | dict[str, int], size: int, said: str
) -> None:
    config = load_config(models[list(FAMILIES).index(model)]) if isinstance(model, str) else load_config_like(**model)
    with pytest.raises(ValueError, match=said):
        shard_config(config, Shard(0, size))


def load_config_like(**change: int) -> ModelConfig:
    return replace(load_config(TARGET_DIR), **change)  # type: ignore[arg-type]
