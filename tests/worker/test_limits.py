"""Limits by device: the table of cards, and one arithmetic of GPU memory for workers, doctor and plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from cli.bench import load_shape
from engine.adapters.slots import AdapterLimits
from engine.attention.shape import AttentionShape
from engine.batch import ForwardRow
from engine.catalogue import build_config
from engine.compose import _measure_step, build_engine
from engine.cuda.graph_shapes import PIECE_TOKENS
from engine.cuda.largest_step import LargestStep, find_step_bytes, split
from engine.cuda.sizes import EXPANDED_BYTES, most_logits
from engine.fallback.config import FallbackConfig
from engine.layer_config import MAX_LOGITS_AT_ONCE as LEAST
from engine.models.table import build_table
from engine.runner import Launched, Runner
from engine.weights.table import Shard, Vector
from runtime.config import DecodeConfig, PrefillConfig
from runtime.gpus import CARDS, Card, CardName, find_card
from tests.support.checkpoints import write_checkpoint
from tests.support.families import DEEPSEEK_V3
from tests.support.pooled import write_pooled
from worker.startup import limits
from worker.startup.device_limits import complete_here, largest_step_of, read_shape, size_pool_here
from worker.startup.limits import (
    LEAST_SESSIONS,
    SESSION_TOKENS,
    Limits,
    complete,
    estimate_room,
    estimate_step_bytes,
    limits_of,
    with_context,
)
from worker.startup.models import locate, locate_model
from worker.table import num_rows_for

GIB = 1 << 30
SHAPES = {name: load_shape(name) for name in ("1B", "8B", "70B")}
GPUS = [name for name in CARDS if name != "cpu"]


def complete_on(card: Card, shape: limits.ModelShape, tp: int) -> tuple[PrefillConfig, DecodeConfig]:
    memory_bytes = int(card.memory_bytes)
    prefill, decode = PrefillConfig(tp=tp), DecodeConfig(tp=tp)
    return complete(prefill, shape, card, memory_bytes), complete(decode, shape, card, memory_bytes)


@pytest.mark.parametrize(
    ("name", "model", "tp", "prefill", "decode"),
    [  # (tokens in a step, at once) of prefill workers, of decode workers
        ("l4", "1B", 1, (2048, 16), (2048, 512)),
        ("l4", "8B", 1, (1024, 16), (1024, 32)),
        ("a100", "8B", 1, (2048, 16), (2048, 512)),
        ("a100", "70B", 4, (1024, 16), (1024, 512)),
        ("h100", "8B", 1, (2048, 16), (2048, 512)),
        ("h100", "8B", 2, (4096, 32), (2048, 1024)),
        ("b200", "8B", 1, (4096, 32), (2048, 1024)),
        ("b200", "70B", 2, (2048, 16), (2048, 512)),
    ],
)
def test_limits_of_cards(
    name: CardName, model: str, tp: int, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    own, other = complete_on(CARDS[name], SHAPES[model], tp)
    assert (own.chunk_tokens, own.max_running) == prefill
    assert (other.local_prefill_chunk_tokens, other.max_running) == decode
    memory_bytes = CARDS[name].memory_bytes
    most = 512 if memory_bytes >= 40e9 else 256  # 128,256 tokens: 2^27 logits, 2^25
    assert limits_of(other, SHAPES[model].vocab_size, most_logits(memory_bytes)).graph_rows == min(
        most, other.max_running
    )


@pytest.mark.parametrize("name", GPUS)
def test_what_limits_take_fits_every_card_that_holds_the_weights(name: CardName) -> None:
    for model, context, tp in product(SHAPES, (8192, 131_072), (1, 2, 4, 8)):
        card, shape = CARDS[name], replace(SHAPES[model], context_tokens=context)
        prefill, decode = complete_on(card, shape, tp)
        for config in (prefill, decode):
            found = limits_of(config, shape.vocab_size, most_logits(card.memory_bytes))
            assert estimate_step_bytes(shape, found, tp) <= card.memory_bytes / 8
            room = estimate_room(shape, found, card.memory_bytes, tp)
            num_tokens = room.left_bytes(0.9) // shape.kv_token_bytes_of(tp)
            if isinstance(config, DecodeConfig) and config.max_running > LEAST_SESSIONS:
                assert num_tokens >= config.max_running * SESSION_TOKENS


def test_set_limits_are_obeyed_and_cpus_have_theirs() -> None:
    card, shape = CARDS["h100"], SHAPES["8B"]
    decode = DecodeConfig(max_running=7, local_prefill_chunk_tokens=99)
    prefill = PrefillConfig(max_running=3, chunk_tokens=100)
    assert complete(decode, shape, card, 80 * GIB) == complete(decode, None, None) == decode
    assert complete(prefill, shape, card, 80 * GIB) == complete(prefill, None, None) == prefill
    decode, prefill = complete(DecodeConfig(), None, None), complete(PrefillConfig(), None, None)
    assert (decode.max_running, decode.local_prefill_chunk_tokens) == (64, 256)
    assert (prefill.max_running, prefill.chunk_tokens) == (16, 512)
    one_worker = complete(DecodeConfig(max_running=700), shape, card, 80 * GIB)
    assert (one_worker.max_running, one_worker.local_prefill_chunk_tokens) == (700, 2048)


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79, "a100"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA L40S", 44, "l40s"),
        ("NVIDIA A10G", 22, "l4"),  # unknown: the slowest of that size
        ("NVIDIA H100 MIG 1g.10gb", 9, "h100"),
        ("NVIDIA H20", 95, "a100"),
        ("NVIDIA GB200", 185, "b200"),
    ],
)
def test_a_card_is_found_by_its_name(device: str, gib: int, name: CardName) -> None:
    assert find_card(device, gib * GIB) is CARDS[name]


def test_settings_that_capture() -> None:
    config = DecodeConfig(max_running=700, local_prefill_chunk_tokens=99)
    assert limits_of(config, 32_000, LEAST) == Limits(700, 99, 512, 8, PIECE_TOKENS)
    assert limits_of(replace(config, speculate="off"), 32_000, LEAST).max_drafts == 0
    assert limits_of(replace(config, draft_model="some/model"), 32_000, LEAST).num_captured == 2
    assert limits_of(replace(config, cuda_graphs=False), 32_000, LEAST) == Limits(700, 99)
    assert limits_of(PrefillConfig(max_running=3, chunk_tokens=99), 32_000, LEAST) == Limits(3, 99, 0, 0, PIECE_TOKENS)


def test_adapters_take_their_slots_and_a_second_set_of_graphs(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", layers=3)
    engine = build_engine(
        str(folder), "", "float32", "cpu", 1, 16, 4, lambda *_: (8, 0), lambda done, total: None, 64,
        adapter_limits=AdapterLimits(3, 8),
    )  # fmt: skip
    assert engine.adapters is not None
    weights = [site.weights for site in engine.adapters.sites.values()]
    slot_bytes = sum(one.a.nbytes + one.b.nbytes for one in weights) // 4 * limits.ITEM_BYTES
    shape, config = (
        limits.shape_of(engine.config),
        DecodeConfig(max_running=64, local_prefill_chunk_tokens=99, speculate="off"),
    )
    with_loras, without = (
        limits_of(replace(config, max_loras=count, max_lora_rank=8), shape.vocab_size, LEAST) for count in (3, 0)
    )
    taken = [estimate_room(shape, one, GIB, 1).taken_bytes for one in (with_loras, without)]
    assert taken[0] - taken[1] == slot_bytes
    graphs = [limits.estimate_graph_bytes(shape, replace(one, piece_tokens=()), 1) for one in (with_loras, without)]
    logits_bytes = 64 * shape.vocab_size * 4 * limits.LOGITS_COPIES  # of one model's largest graph
    assert graphs[0] == 2 * graphs[1] - logits_bytes


def test_a_worker_sizes_its_pool_as_the_plan_does() -> None:
    """With a step measured to be as large as estimated, the pool is the estimated one; with a larger one it is smaller.

    The model is the demo's; its pool would be as large as its batch needs, so the batch is large.
    """
    config = locate(DecodeConfig(max_running=100_000, local_prefill_chunk_tokens=2048))
    shape = with_context(read_shape(config), config)
    card = replace(CARDS["h100"], memory_bytes=40 * GIB)
    found = limits_of(config, shape.vocab_size, most_logits(card.memory_bytes))
    step_bytes = estimate_step_bytes(shape, found, 1)
    room = estimate_room(shape, found, card.memory_bytes, 1)
    page_bytes = shape.kv_token_bytes * config.page_tokens
    size = partial(size_pool_here, config, shape.context_tokens, page_bytes, 1)
    pages, _ = size((room.total_bytes, room.taken_bytes, step_bytes), 0)
    assert pages == room.left_bytes(0.9) // page_bytes
    fewer, _ = size((room.total_bytes, room.taken_bytes, step_bytes + GIB), 0)
    assert (pages - fewer) * page_bytes == pytest.approx(GIB * (1 + limits.STEP_MARGIN), abs=page_bytes)


# -- the measured step -----------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(1, 100), st.integers(1, 500))
def test_the_largest_step_has_the_chunk_and_all_sequences(chunk: int, sequences: int, context: int) -> None:
    counts = split(LargestStep(chunk, sequences, "--chunk-tokens"), context)
    assert len(counts) == sequences and max(counts) <= context and min(counts) >= 1
    assert sum(counts) >= min(chunk, sequences * context)
    assert sum(counts) <= chunk + sequences


def test_it_is_run_for_both_models_and_an_error_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one page that all rows share; rows and the pool stay as they were."""
    step = largest_step_of(complete(DecodeConfig(max_running=6, local_prefill_chunk_tokens=150), None, None))
    engine = build_engine(
        locate_model("demo"), locate_model("demo"), "float32", "cpu", 1, 16, num_rows_for(6), lambda *_: (8, 0),
        lambda done, total: None, 64,
    )  # fmt: skip
    draft_runner, draft_pool = engine.draft_runner, engine.pool.draft_tensor
    assert draft_runner is not None and draft_pool is not None
    pages = engine.pool.shape.with_pages(1)
    models = [(one.model, engine.attention, pages) for one in (engine.runner, draft_runner)]
    steps: list[int] = []
    launch = Runner.launch

    def note(self: Runner, requests: list[ForwardRow]) -> Launched:
        steps.append(sum(request.count for request in requests))
        assert len(requests) == 6 and all(request.num_logits == 1 for request in requests)
        return launch(self, requests)

    def measure(work: Callable[[], None], _device: torch.device) -> int:
        work()
        return steps[-1] + len(steps)

    monkeypatch.setattr(Runner, "launch", note)
    monkeypatch.setattr("engine.compose.find_step_bytes", partial(find_step_bytes, measure=measure))
    assert _measure_step(step, models, engine.rows) == 155, "the larger of both"
    assert steps == [153, 153], "64 + 64 + 22 tokens and 3 rows"
    assert not engine.rows.page_table.any() and not engine.pool.tensor.any() and not draft_pool.any()

    def fill(_self: Runner, _step: object) -> Launched:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Runner, "_run", fill)
    said = r"step of 150 prompt tokens \(CUDA out of memory\): lower --local-prefill-chunk-tokens"
    with pytest.raises(ValueError, match=said):
        _measure_step(step, models, engine.rows)


def test_a_model_without_native_code_has_limits_too() -> None:
    shapes = (AttentionShape(32, 8, 128, 0.1),) * 32
    config = FallbackConfig("other", 128_256, 8192, shapes, (None,) * 32, False, ("m",) * 32)
    shape = limits.shape_of(config, 16 * GIB)
    assert (shape.num_weights, shape.kv_token_bytes) == (8 * GIB, SHAPES["8B"].kv_token_bytes)
    assert complete(DecodeConfig(), shape, CARDS["h100"], 80 * 10**9).max_running == 512


def test_latents_take_what_pages_keep_of_them_on_each_rank() -> None:
    shape = limits.shape_of(build_config(DEEPSEEK_V3))
    assert shape.kv_token_bytes == 61 * 576 * 2 == shape.kv_token_bytes_of(8)
    assert shape.describe_kv() == "68.6 KiB of KV a token, 71 times less than its heads"
    assert SHAPES["8B"].describe_kv() == "128 KiB of KV a token"
    assert (shape.num_weights, shape.num_active) == (671_026_419_200, 36_625_618_432)


DENSE = AutoConfig.for_model("qwen3", num_attention_heads=32, num_key_value_heads=8).to_dict()
EXPERTS = AutoConfig.for_model("qwen3_moe", num_attention_heads=32, num_key_value_heads=8).to_dict()


@pytest.mark.parametrize("keys", [DEEPSEEK_V3, DENSE, EXPERTS], ids=lambda keys: keys["model_type"])
def test_a_rank_is_planned_with_the_weights_that_it_reads(keys: dict[str, Any]) -> None:
    config = build_config(keys)
    shape, rank = limits.shape_of(config), Shard(3, 8)
    read = sum(
        weight.axis.num_read(rank) if isinstance(weight, Vector) else sum(weight.num_rows(rank)) * weight.depth(rank)
        for weight in build_table(config).weights()
    )
    assert shape.weight_bytes_of(8) == pytest.approx(2 * read, rel=1e-4)
    assert shape.weight_bytes_of(1) == 2 * shape.num_weights


FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
KIMI_K2 = DEEPSEEK_V3 | dict(
    model_type="kimi_k2", num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, n_group=1, topk_group=1,
    first_k_dense_replace=1, vocab_size=163_840, num_nextn_predict_layers=0, max_position_embeddings=131_072,
)  # fmt: skip


def test_fp8_models_with_latents_are_planned_by_what_their_config_says() -> None:
    """DeepSeek V3 fits 8 H200 with half a million tokens; Kimi K2 does not, and fits 8 B200."""
    for keys, num_weights, num_bytes in ((DEEPSEEK_V3, 671e9, 673e9), (KIMI_K2, 1026e9, 1029e9)):
        shape = limits.shape_of(build_config(keys | FP8))
        assert shape.num_weights == pytest.approx(num_weights, rel=1e-3)
        assert shape.num_weights * shape.weight_bytes == pytest.approx(num_bytes, rel=1e-3)
        plain = limits.shape_of(build_config(keys))
        assert (plain.weight_bytes, plain.kv_token_bytes) == (2, shape.kv_token_bytes)
        fitting, most = {}, limits.Limits(256, 2048, 256, 3, (512,))
        for name in ("h200", "b200"):
            room = estimate_room(shape, most, CARDS[name].memory_bytes, 8)
            fitting[name] = room.left_bytes(0.9) // shape.kv_token_bytes_of(8)
        assert fitting["b200"] > 300_000 and (500_000 < fitting["h200"] < 700_000) == (keys is DEEPSEEK_V3)
        assert fitting["h200"] == 0 or keys is DEEPSEEK_V3
    step, dense = Limits(64, 2048), replace(shape, full_kv_width=0)
    expanded = limits.estimate_step_bytes(shape, step, 8) - limits.estimate_step_bytes(dense, step, 8)
    assert expanded == EXPANDED_BYTES, "what FlashInfer's heads take, from the first step on"


def test_kv_counts_as_pages_hold_it() -> None:
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 3072}
    padded, whole = (
        limits.shape_of(build_config(AutoConfig.for_model("llama", head_dim=dim, **sizes).to_dict()))
        for dim in (96, 128)
    )
    assert padded.kv_token_bytes == whole.kv_token_bytes and padded.query_width < whole.query_width


def test_a_worker_on_a_gpu_asks_for_its_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: facts)
    for config in (locate(DecodeConfig()), locate(PrefillConfig(max_running=5))):
        found = complete_here(config, torch.device("cuda"))
        assert found == complete(config, read_shape(config), CARDS["h100"], facts.total_memory)
        assert found.max_running == (config.max_running or 1024)
        assert largest_step_of(found).chunk_tokens >= 512
    assert complete_here(DecodeConfig(model="/nowhere"), torch.device("cpu")).max_running == 64, "nothing is read"


def test_each_thread_of_a_cpu_computes_texts_of_its_own(tmp_path: Path) -> None:
    """As many for the next step come while one runs. Models whose texts are divided are as others."""
    cpu, folders = torch.device("cpu"), [tmp_path / name for name in ("whole", "last")]
    write_pooled(folders[0], "bert", "BertModel", "mean_tokens")
    write_pooled(folders[1], "qwen3", "Qwen3Model", "lasttoken")
    wide, usual = (complete_here(PrefillConfig(model=str(one), threads=8), cpu) for one in folders)
    assert (wide.chunk_tokens, wide.max_running) == (4096, 64) and (usual.chunk_tokens, usual.max_running) == (512, 16)
    chosen = complete_here(PrefillConfig(model=str(folders[0]), threads=8, chunk_tokens=32, max_running=3), cpu)
    assert (chosen.chunk_tokens, chosen.max_running) == (32, 3)


QUANTISED = {  # family, sizes |-> bytes of the file, H100s
    "gpt-oss-120b": ("gpt_oss", {"num_hidden_layers": 36, "num_local_experts": 128}, 65.2e9, 1),
    "Qwen3-235B-FP8": ("qwen3_moe", dict(
        num_hidden_layers=94, num_experts=128, num_experts_per_tok=8, hidden_size=4096, moe_intermediate_size=1536,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151_936,
    ), 236.6e9, 4),
    "Llama-70B-AWQ": ("llama", dict(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28_672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128_256,
    ), 39.8e9, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_large_quantised_models_fit_as_their_files_do(name: str) -> None:
    family, sizes, file_bytes, tp = QUANTISED[name]
    config = build_config(AutoConfig.for_model(family, **sizes).to_dict())
    shape = limits.shape_of(replace(config, quantization={}), int(file_bytes))
    _, decode = complete_on(CARDS["h100"], shape, tp)
    found = limits_of(decode, shape.vocab_size, most_logits(int(CARDS["h100"].memory_bytes)))
    room = estimate_room(shape, found, CARDS["h100"].memory_bytes, tp)
    assert room.left_bytes(0.9) > 4 * 8192 * shape.kv_token_bytes_of(tp), "four contexts of 8,192 tokens"
    assert room.taken_bytes * tp < 1.1 * file_bytes


def test_experts_that_are_not_rounded_count_in_16_bits_and_with_their_float32_products() -> None:
    config = build_config(AutoConfig.for_model("gpt_oss").to_dict())
    shape = limits.shape_of(config, 65_000_000_000)
    kept_bytes = shape.num_weights * shape.weight_bytes
    assert 2.2e11 < kept_bytes < 2 * shape.num_weights, "all but two thousand million are experts"
    assert limits.shape_of(config, 2 * shape.num_weights).weight_bytes == 2
    dense = replace(shape, expert_rows=0)
    assert limits.estimate_token_bytes(shape, 1) == limits.estimate_token_bytes(dense, 1) + 4 * 4 * 2880
