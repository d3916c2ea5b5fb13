"""A model divided among ranks: each chooses the tokens of a single process and has its share of the weights; sums."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from demo.paths import TARGET_DIR
from engine.catalogue import load_config
from engine.cuda import gpu_ranks, one_shot
from engine.cuda.cuda_memory import CudaError
from engine.cuda.one_shot import choose_limit
from engine.models.config import ModelConfig
from engine.models.table import build_table, shard_config
from engine.rank_group import join_group
from engine.ranks import Ranks
from engine.stages import check_stages
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.reader import ShardReader
from engine.weights.table import Product, Shard
from tests.support import rank_process
from tests.support.checkpoints import write_checkpoint
from tests.support.fake_cuda import FakeGpu
from tests.support.forks import ForkedPopen
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
    "deepseek_v2_lite": {},  # latents that every rank has, queries beside them
    "deepseek_v3": {},  # compressed queries
    "glm4_moe": {},  # dense layers, mixtures with a shared expert
    "gpt_oss": {},  # sinks, biases of experts
    "olmo3": {},  # norms over all heads of all ranks
    "phi3": {},  # packed weights
    "qwen3_moe": {},
    "qwen3_5_moe": {"num_kv_heads": 1},  # states, gates beside queries, a shared expert with a gate
    "qwen3_vl": {},  # rows of images
    "lfm2_moe": {},  # states, biases of convolutions
}

UNDIVIDED = {  # family |-> what keeps it from having stages
    "gemma4_26b_a4b": "layers whose pages differ",
    "gemma4_e2b": "inputs of each layer",
    "qwen3_5_moe": "its recurrent states",
    "qwen3_vl": "images",
    "lfm2_moe": "its recurrent states",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        write_checkpoint(tmp_path_factory.mktemp(family), family, **settings) for family, settings in FAMILIES.items()
    ]


def run_ranks(models: Sequence[Path], folder: Path, size: int, stages: int = 1) -> list[list[list[list[list[int]]]]]:
    """The tokens chosen by each of `size` processes, without and with graphs unless in stages, model by model."""
    command = [sys.executable, "-m", "tests.support.rank_process", str(folder / f"meet-{size}-{stages}")]
    processes = [
        ForkedPopen([*command, str(rank), str(size), str(stages), *map(str, models)], stdout=subprocess.PIPE, text=True)
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


@pytest.mark.parametrize(("size", "stages"), [(2, 2), (4, 2)])
def test_stages_choose_the_tokens_of_one_process(
    models: Sequence[Path], tmp_path: Path, size: int, stages: int
) -> None:  # fmt: skip
    divided = [model for model, family in zip(models, FAMILIES, strict=True) if family not in UNDIVIDED]
    with on_one_thread():
        alone = [rank_process.run(model, Ranks()) for model in divided]
    assert run_ranks(divided, tmp_path, size, stages) == [[alone]] * size


@pytest.mark.parametrize("family", UNDIVIDED)
def test_a_model_that_cannot_be_divided_into_stages_is_refused_by_name(models: Sequence[Path], family: str) -> None:
    with pytest.raises(ValueError, match=f"for {UNDIVIDED[family]}: set --pp 1"):
        check_stages(load_config(models[list(FAMILIES).index(family)]), 2)


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


@pytest.mark.nightly
def test_ranks_get_the_same_right_bits_round_after_round_until_one_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.sum_process", str(tmp_path / "meet"), "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("small sums over ranks by one kernel") == 4
    results = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("result ")]
    assert len({digest for digest, _ in results}) == 1
    assert sorted("a rank did not come" in fate for _, fate in results) == [False, True, True, True]


def test_the_limit_is_where_reading_all_parts_costs_what_is_saved() -> None:
    assert choose_limit(2) == gpu_ranks.MAX_ROWS * gpu_ranks.MAX_ROW_BYTES  # as many bytes as NCCL: the buffer's size
    assert choose_limit(4) == 2_000_000
    assert choose_limit(8) == 571_428


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (torch.empty(128, 8192, dtype=torch.bfloat16), True),
        (torch.empty(128, 2), True),
        (torch.empty(129, 64), False),  # more rows than places
        (torch.empty(1, 8200), False),  # wider than a place
        (torch.empty(0, 64), False),
        (torch.empty(4, 64).T, False),
        (torch.empty(4), False),
        (torch.empty(4, 64, dtype=torch.int64), False),
    ],
)
def test_parts_that_fit(part: torch.Tensor, expected: bool) -> None:
    assert gpu_ranks.fits(part) is expected


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    join_group(str(tmp_path / "meet"), 0, 1, CPU, timeout_s=10)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_captured_sums_register_no_memory(group: dist.ProcessGroup) -> None:
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"


def test_ranks_that_cannot_or_err_keep_to_nccl(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()

    def fail(_address: int) -> bytes:
        raise CudaError("cudaIpcGetMemHandle: operation not supported")

    monkeypatch.setattr(one_shot, "PROBES", one_shot.PROBES[:1])
    assert one_shot.open_ranks(group, CPU, gpu) is None  # one rank: not a size that the kernel has
    monkeypatch.setattr(one_shot, "SIZES", (1,))
    assert one_shot.open_ranks(group, CPU, gpu) is not None
    with monkeypatch.context() as failing:
        failing.setattr(gpu.cudart, "export", fail)
        assert one_shot.open_ranks(group, CPU, gpu) is None
    monkeypatch.setattr(gpu_ranks, "all_reduce_", lambda part, _shared: part * 2)
    assert one_shot.open_ranks(group, CPU, gpu) is None
