"""Every native family against transformers' own code, on tiny checkpoints: chunks, batches, windows, experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.layers.linear import Quantization
from engine.models import load as weights
from engine.models.json_values import read_json
from engine.models.read_config import build_config, load_config
from engine.models.table import shard_config
from engine.weights.table import Shard
from tests.support.attention import needs_compiler
from tests.support.checkpoints import write_checkpoint
from tests.support.families import FAMILIES
from tests.support.forward import PROMPTS, Steps
from wire.kv_layout import KvPart, StatePart

HYBRIDS = ["qwen3_5_text", "qwen3_5_moe", "lfm2", "lfm2_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    return name, write_checkpoint(tmp_path_factory.mktemp(name), name)


def compute_expected(name: str, folder: Path) -> list[Tensor]:
    """Logits [n, V] of each of PROMPTS by transformers."""
    model_class: Any = getattr(transformers, FAMILIES[name].model)
    reference = model_class.from_pretrained(folder).eval()
    with torch.inference_mode():
        return [reference(prompt[None], use_cache=False).logits[0] for prompt in PROMPTS]


def test_logits_are_those_of_transformers(family: tuple[str, Path]) -> None:
    """Prompts in chunks, some tokens one at a time, several sequences in a batch."""
    steps, expected = Steps(family[1]), compute_expected(*family)
    with torch.inference_mode():
        found: list[list[Tensor]] = [[], [], []]
        for spans in (
            [(0, 0, 40)], [(1, 0, 20), (0, 40, 41), (2, 0, 34)], [(0, 41, 42), (1, 20, 41)], [(0, 42, 75)],
        ):  # fmt: skip
            for (which, *_), logits in zip(spans, steps.step(*spans), strict=True):
                found[which].append(logits)
    for parts, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), truth, rtol=1e-4, atol=5e-4)
        assert torch.equal(torch.cat(parts).argmax(-1), truth.argmax(-1))


def test_a_row_is_the_same_alone_and_among_others(family: tuple[str, Path]) -> None:
    """In bfloat16, which the CPU's kernels multiply row by row."""
    _, folder = family
    alone, among = Steps(folder, "bfloat16"), Steps(folder, "bfloat16")
    with torch.inference_mode():
        for which in range(3):
            alone.step((which, 0, 8))
            among.step((which, 0, 8))
        together = among.step(*((which, 8, 9) for which in range(3)))
        for which in range(3):
            (own,) = alone.step((which, 8, 9))
            assert torch.equal(own, together[which]), which


def test_older_spellings_mean_the_same(tmp_path: Path) -> None:
    """Files from before transformers 5 have the rope's values beside each other, and other keys for experts."""
    for name in FAMILIES:
        config = dict(read_json(write_checkpoint(tmp_path / name, name) / "config.json"))
        text = dict(config.get("text_config") or config)
        if "per_layer_config" in text:  # Gemma 4's older files have keys for its full layers
            full = next(iter(text.pop("per_layer_config").values()))
            text["global_head_dim"] = full["head_dim"]
            text["num_global_key_value_heads"] = full.get("num_key_value_heads")
            old = {**config, "text_config": text} if "text_config" in config else text
            assert build_config(old) == load_config(tmp_path / name), name
            continue
        rope = text.pop("rope_parameters")
        if "full_attention" in rope:
            text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        text["rope_theta"] = rope["rope_theta"]
        text["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        if "partial_rotary_factor" in rope:
            text["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if name == "qwen3_moe":
            text["num_experts"] = text.pop("num_local_experts", None) or text["num_experts"]
        old = {**config, "text_config": text} if "text_config" in config else text
        assert build_config(old) == load_config(tmp_path / name), name


@needs_compiler
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_packed_weights_from_a_file_are_those_in_memory(
    family: tuple[str, Path], quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what rounding adds to logits is no more than a part of them: experts of other choices add most."""
    _, folder = family
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    span = (0, 0, 40)
    with torch.inference_mode():
        (own,) = Steps(folder, "bfloat16", quantization).step(span)
        monkeypatch.setattr(weights, "SMALLEST_FILE_BYTES", 0)
        for _ in ("written", "mapped"):
            steps = Steps(folder, "bfloat16", quantization)
            assert steps.decoder.mapped_bytes
            assert torch.equal(steps.step(span)[0], own)
        (truth,) = Steps(folder).step(span)
    assert (own - truth).norm() < 0.4 * truth.norm()


def test_layers_that_read_the_keys_of_others_have_no_pages(tmp_path: Path) -> None:
    small = load_config(write_checkpoint(tmp_path / "e2b", "gemma4_e2b"))
    assert [layer.kv_layer for layer in small.layers] == [None] * 4 + [2, 3]
    assert small.kv_parts == (KvPart(2, 2, 32), KvPart(2, 2, 64)) and small.windows == (8, None, 8, None)
    large = load_config(write_checkpoint(tmp_path / "31b", "gemma4_31b"))
    assert large.kv_parts == (KvPart(1, 2, 32), KvPart(1, 1, 64))
    assert shard_config(large, Shard(1, 2)).kv_parts == (KvPart(1, 1, 32), KvPart(1, 1, 64))


def test_weights_that_shared_layers_do_not_use_may_be_in_the_file(tmp_path: Path) -> None:
    """As in the published E2B and E4B."""
    folder = write_checkpoint(tmp_path, "gemma4_e2b")
    expected = Steps(folder).step((0, 0, 20))[0]
    tensors = load_file(folder / "model.safetensors")
    for layer in (4, 5):
        for name in ("k_proj", "v_proj", "k_norm"):
            full = f"model.language_model.layers.{layer}.self_attn.{name}.weight"
            tensors[full] = tensors[full.replace(f".{layer}.", f".{layer - 2}.")].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Steps(folder).step((0, 0, 20))[0], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 5}, "leaves no layer whose keys and values fit those of layer 1"),
        ({"num_kv_shared_layers": 7}, "leaves no layer whose keys and values fit those of layer 0"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be an integer from 0"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, "per_layer_config with sliding_window is not supported"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "4 heads are to be divided"),
        ({"per_layer_config": {"1": {"head_dim": 15}}}, "head_dim even"),
        ({"per_layer_config": {"1": 15}}, "1 must be an object, not 15"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input 100 .* supported: vocab_size, 320"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
    ],
)
def test_what_gemma_4_cannot_be_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = read_json(write_checkpoint(tmp_path, "gemma4_e2b") / "config.json")
    with pytest.raises(ValueError, match=message):
        build_config({**config, "text_config": {**config["text_config"], **change}})


def test_the_last_layer_is_full_and_images_may_see_both_ways() -> None:
    layers = {"num_hidden_layers": 7, "hidden_size": 64, "hidden_size_per_layer_input": 0}
    config = build_config({"model_type": "gemma4_text", "use_bidirectional_attention": "vision", **layers})
    assert config.windows == (512,) * 5 + (None, None)  # each sixth, and the last
    assert [shape.head_dim for shape in config.attention_shapes] == [256] * 5 + [512] * 2
    assert [rope.turned_share for rope in config.ropes] == [0.25, 1.0]


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_go_from_step_to_step(name: str, tmp_path: Path) -> None:
    """Chunks of several sizes without logits, then single tokens."""
    expected = compute_expected(name, write_checkpoint(tmp_path, name))
    with torch.inference_mode():
        for size in (1, 5, 16):
            steps = Steps(tmp_path)
            for begin in range(0, 32, size):
                steps.step(*((which, begin, min(begin + size, 32)) for which in range(3)), has_logits=False)
            for position in (32, 33):
                found = steps.step(*((which, position, position + 1) for which in (2, 0, 1)))
                truth = [expected[which][position : position + 1] for which in (2, 0, 1)]
                torch.testing.assert_close(torch.cat(found), torch.cat(truth), rtol=1e-4, atol=5e-4)


def test_layers_without_attention_have_slots_and_no_pages(tmp_path: Path) -> None:
    qwen = load_config(write_checkpoint(tmp_path / "qwen", "qwen3_5_text"))
    assert qwen.kv_parts == (KvPart(1, 2, 32),) and qwen.windows == (None,)
    convolution = StatePart(2, 2, (16, 3))
    assert qwen.state_parts == (convolution, convolution, StatePart(2, 4, (32, 3)), StatePart(2, 4, (16, 32)))
    lfm = load_config(write_checkpoint(tmp_path / "lfm", "lfm2"))
    assert lfm.kv_parts == (KvPart(1, 2, 32),) and lfm.state_parts == (StatePart(2, 4, (32, 2)),)
    assert [part.num_heads for part in shard_config(qwen, Shard(1, 2)).state_parts] == [1, 1, 2, 2]
    assert [part.num_heads for part in shard_config(lfm, Shard(0, 4)).state_parts] == [1]


def test_published_files_of_qwen_3_5_have_all_experts_in_one_tensor(tmp_path: Path) -> None:
    """And layers that predict several tokens ahead."""
    folder = write_checkpoint(tmp_path, "qwen3_5_moe")
    expected = Steps(folder).step((0, 0, 20))[0]
    tensors = load_file(folder / "model.safetensors")
    stacked = {"mtp.fc.weight": torch.zeros(128, 256)}
    for layer in range(3):
        experts = f"model.language_model.layers.{layer}.mlp.experts."
        each = {
            part: torch.stack([tensors.pop(f"{experts}{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        stacked[f"{experts}gate_up_proj"] = torch.cat([each["gate"], each["up"]], 1)
        stacked[f"{experts}down_proj"] = each["down"]
    save_file(tensors | stacked, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Steps(folder).step((0, 0, 20))[0], expected)


@pytest.mark.parametrize("change", [{"block_ffn_dim_multiplier": 1.3}, {"block_auto_adjust_ff_dim": False}])
def test_sizes_of_mlps_are_those_of_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "lfm2", block_multiple_of=48, **change)
    (found,) = Steps(folder).step((0, 0, 20))
    torch.testing.assert_close(found, compute_expected("lfm2", folder)[0][:20], rtol=1e-4, atol=5e-4)


def test_what_first_files_of_lfm_2_say(tmp_path: Path) -> None:
    config = dict(read_json(write_checkpoint(tmp_path, "lfm2", tied=False) / "config.json"))
    config |= {"block_ff_dim": config.pop("intermediate_size"), "tie_embedding": config.pop("tie_word_embeddings")}
    config |= {"full_attn_idxs": [1], "layer_types": None}
    assert build_config(config) == load_config(tmp_path)
    assert all(layer.has_attention for layer in build_config(config | {"full_attn_idxs": None}).layers)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_5_text", {"layer_types": ["conv"] * 3}, "layer_types .*'conv'.* supported: full_attention, linear_att"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "layer_types without full_attention"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"]}, "1 entries for num_hidden_layers 3"),
        ("qwen3_5_text", {"layer_types": None}, "layer_types without full_attention"),  # each fourth has attention
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "key_heads 3 does not divide linear_num_value_heads 4"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer from 2"),
        ("lfm2", {"layer_types": ["linear_attention"] * 3}, "supported: full_attention, conv"),
        ("lfm2", {"conv_L_cache": "3"}, "conv_L_cache must be an integer from 2 .* not '3'"),
        ("lfm2", {"conv_bias": 1}, "conv_bias must be true or false"),
        ("lfm2", {"num_attention_heads": 6, "head_dim": 32}, "num_attention_heads 6 does not divide hidden_size 128"),
    ],
)
def test_what_hybrids_cannot_be_is_named(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = read_json(write_checkpoint(tmp_path, name) / "config.json")
    with pytest.raises(ValueError, match=message):
        build_config({**config, **change})
