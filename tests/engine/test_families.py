"""Every native family, and odd shapes, against transformers' own code on tiny checkpoints: chunks, batches, windows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.catalogue import build_config, load_config
from engine.cpu import format as weights
from engine.layers.linear import Quantization
from engine.models.table import shard_config
from engine.weights.table import Shard
from tests.support.attention import needs_compiler
from tests.support.checkpoints import write_checkpoint, write_config
from tests.support.families import FAMILIES, LLAMA3, YARN
from tests.support.forward import PROMPTS, Steps
from wire.files import read_json_object
from wire.kv_layout import KvPart, StatePart

LINEAR = {"rope_type": "linear", "factor": 4.0}


def shape(family: str, num_heads: int, num_kv_heads: int, head_dim: int, tied: bool, **rest: Any) -> dict[str, Any]:
    """Keyword arguments of `write_checkpoint`."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return {"family": family, "tied": tied, **heads, **rest}


# Each GQA ratio (1, 3, 8), head_dim (64, 80, 128), tying, rope, window and sharding occurs.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-linear": shape("llama", 6, 2, 80, True, hidden=192, rope_scaling=LINEAR),
    "llama-llama3-bias-sharded": shape(
        "llama", 8, 1, 128, False, rope_scaling=LLAMA3, attention_bias=True, mlp_bias=True, shards=3, layers=3
    ),
    "mistral-yarn": shape("mistral", 3, 3, 80, False, rope_scaling=YARN),
    "mistral-window": shape("mistral", 8, 1, 64, True, sliding_window=21),
    "qwen2-window-linear": shape("qwen2", 2, 2, 128, False, layers=3, sliding_window=16, rope_scaling=LINEAR),
    "qwen3-window-sharded": shape("qwen3", 3, 1, 128, False, sliding_window=17, shards=2),
}
WITHIN = {"gemma3_text", "qwen3_5_moe_text"}  # text parts of other families, which are compared
CHECKPOINTS = {name: {"family": name} for name in FAMILIES if name not in WITHIN} | SHAPES
PACKED = {  # unlike kinds of products, and in 8 bits of experts; see test_packed.py
    "none": ("llama", "gemma4_e2b", "gpt_oss", "phi3", "qwen3_5_moe"),
    "int8": ("gemma4_26b_a4b",),
}


@dataclass(frozen=True)
class Twin:
    """A checkpoint, and transformers' logits [n, V] of each of PROMPTS."""

    folder: Path
    logits: list[Tensor]


def compute_expected(name: str, folder: Path) -> list[Tensor]:
    model_class: Any = getattr(transformers, FAMILIES[name].model)
    reference, loading = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.inference_mode():
        return [reference.eval()(prompt[None], use_cache=False).logits[0] for prompt in PROMPTS]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    settings = CHECKPOINTS[request.param]
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), **settings)
    return Twin(folder, compute_expected(settings["family"], folder))


def test_logits_are_those_of_transformers(twin: Twin) -> None:
    """Prompts in chunks, some tokens one at a time, several sequences in a batch."""
    steps = Steps(twin.folder)
    with torch.inference_mode():
        found: list[list[Tensor]] = [[], [], []]
        for spans in (
            [(0, 0, 40)], [(1, 0, 20), (0, 40, 41), (2, 0, 34)], [(0, 41, 42), (1, 20, 41)], [(0, 42, 75)],
        ):  # fmt: skip
            for (which, *_), logits in zip(spans, steps.step(*spans), strict=True):
                found[which].append(logits)
    for parts, truth in zip(found, twin.logits, strict=True):
        torch.testing.assert_close(torch.cat(parts), truth, rtol=1e-4, atol=5e-4)
        assert torch.equal(torch.cat(parts).argmax(-1), truth.argmax(-1))


@needs_compiler
@pytest.mark.parametrize(("quantization", "family"), [(how, name) for how, names in PACKED.items() for name in names])
def test_packed_weights_from_a_file_are_those_in_memory(
    family: str, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is the same alone and among others. Rounding changes logits by a part of them."""
    folder = write_checkpoint(tmp_path / "model", family)
    monkeypatch.setattr(weights, "cache_folder", lambda: tmp_path)  # of files of weights; kernels are shared
    with torch.inference_mode():
        (own,) = Steps(folder, "bfloat16", quantization).step((0, 0, 40))
        (truth,) = Steps(folder).step((0, 0, 40))
        assert (own - truth).norm() < (0.4 if quantization == "int8" else 0.2) * truth.norm()
        monkeypatch.setattr(weights, "SMALLEST_FILE_BYTES", 0)
        written, mapped = Steps(folder, "bfloat16", quantization), Steps(folder, "bfloat16", quantization)
        assert written.decoder.mapped_bytes and mapped.decoder.mapped_bytes
        written.step((0, 0, 40), (1, 0, 8), (2, 0, 8))
        assert torch.equal(mapped.step((0, 0, 40))[0], own)
        for which in (1, 2):
            mapped.step((which, 0, 8))
        among = written.step((0, 40, 41), (1, 8, 9), (2, 8, 9))
        for which, at in enumerate((40, 8, 8)):
            assert torch.equal(mapped.step((which, at, at + 1))[0], among[which]), which


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen2-window-linear", "qwen3_moe", "deepseek_v3"])
def test_half_precision_is_as_near_as_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    settings = CHECKPOINTS[name]
    folder = write_checkpoint(tmp_path, **settings)
    (truth, *_) = compute_expected(settings["family"], folder)
    steps = Steps(folder, dtype)
    model_class: Any = getattr(transformers, FAMILIES[settings["family"]].model)
    with torch.inference_mode():
        (logits,) = steps.step((0, 0, 75))
        theirs = model_class.from_pretrained(folder, dtype=steps.decoder.dtype)(PROMPTS[0][None]).logits[0].float()
    assert (logits - truth).norm() < 2 * (theirs - truth).norm() + 1e-3 * truth.norm()


def test_older_spellings_mean_the_same(tmp_path: Path) -> None:
    """Files from before transformers 5 have the rope's values beside each other, and other keys for experts."""
    for name in FAMILIES:
        config = dict(read_json_object(write_config(tmp_path / name, name) / "config.json"))
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
        if "mrope_section" in rope:
            text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        if "partial_rotary_factor" in rope:
            text["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if name == "qwen3_moe":
            text["num_experts"] = text.pop("num_local_experts", None) or text["num_experts"]
        old = {**config, "text_config": text} if "text_config" in config else text
        if name == "qwen2_5_vl":  # its first files have both parts in one
            old = {**text, **{key: value for key, value in config.items() if key != "text_config"}}
        assert build_config(old) == load_config(tmp_path / name), name


def test_layers_have_pages_or_slots_of_their_own_or_read_those_of_others(tmp_path: Path) -> None:
    small = load_config(write_config(tmp_path / "e2b", "gemma4_e2b"))
    assert [layer.kv_layer for layer in small.layers] == [None] * 4 + [2, 3]
    assert small.kv_parts == (KvPart(2, 2, 32), KvPart(2, 2, 64)) and small.windows == (8, None, 8, None)
    large = load_config(write_config(tmp_path / "31b", "gemma4_31b"))
    assert shard_config(large, Shard(1, 2)).kv_parts == (KvPart(1, 1, 32), KvPart(1, 1, 64))
    qwen = load_config(write_config(tmp_path / "qwen", "qwen3_5_text"))
    assert qwen.kv_parts == (KvPart(1, 2, 32),) and qwen.windows == (None,)
    convolution = StatePart(2, 2, (16, 3))
    assert qwen.state_parts == (convolution, convolution, StatePart(2, 4, (32, 3)), StatePart(2, 4, (16, 32)))
    assert [part.num_heads for part in shard_config(qwen, Shard(1, 2)).state_parts] == [1, 1, 2, 2]


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


def test_the_last_layer_is_full_and_images_may_see_both_ways() -> None:
    layers = {"num_hidden_layers": 7, "hidden_size": 64, "hidden_size_per_layer_input": 0}
    config = build_config({"model_type": "gemma4_text", "use_bidirectional_attention": "vision", **layers})
    assert config.windows == (512,) * 5 + (None, None)  # each sixth, and the last
    assert [shape.head_dim for shape in config.attention_shapes] == [256] * 5 + [512] * 2
    assert [rope.turned_share for rope in config.ropes] == [0.25, 1.0]


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


def test_what_first_files_of_lfm_2_say(tmp_path: Path) -> None:
    config = dict(read_json_object(write_config(tmp_path, "lfm2", tied=False) / "config.json"))
    config |= {"block_ff_dim": config.pop("intermediate_size"), "tie_embedding": config.pop("tie_word_embeddings")}
    config |= {"full_attn_idxs": [1], "layer_types": None}
    assert build_config(config) == load_config(tmp_path)
    assert all(layer.has_attention for layer in build_config(config | {"full_attn_idxs": None}).layers)
    config |= {"block_ff_dim": 300, "block_auto_adjust_ff_dim": False}
    assert build_config(config).intermediate_size == 300


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_5_text", {"layer_types": ["conv"] * 3}, "layer_types .*'conv'.* supported: full_attention, linear_att"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "layer_types without full_attention"),
        ("qwen3_5_text", {"layer_types": None}, "layer_types without full_attention"),  # each fourth has attention
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "key_heads 3 does not divide linear_num_value_heads 4"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer from 2"),
        ("lfm2", {"layer_types": ["linear_attention"] * 3}, "supported: full_attention, conv"),
        ("lfm2", {"conv_L_cache": "3"}, "conv_L_cache must be an integer from 2 .* not '3'"),
        ("lfm2", {"conv_bias": 1}, "conv_bias must be true or false"),
        ("lfm2", {"num_attention_heads": 6, "head_dim": 32}, "num_attention_heads 6 does not divide hidden_size 128"),
        ("gemma4_e2b", {"num_kv_shared_layers": 5}, "leaves no layer whose keys and values fit those of layer 1"),
        ("gemma4_e2b", {"num_kv_shared_layers": -1}, "num_kv_shared_layers must be an integer from 0"),
        ("gemma4_e2b", {"per_layer_config": {"1": {"sliding_window": 4}}}, "with sliding_window is not supported"),
        ("gemma4_e2b", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "4 heads are to be divided"),
        ("gemma4_e2b", {"per_layer_config": {"1": {"head_dim": 15}}}, "head_dim even"),
        ("gemma4_e2b", {"per_layer_config": {"1": 15}}, "1 must be an object, not 15"),
        ("gemma4_e2b", {"vocab_size_per_layer_input": 100}, "layer_input 100 .* supported: vocab_size, 320"),
        ("gemma4_e2b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
    ],
)
def test_what_a_family_cannot_be_is_named(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = dict(read_json_object(write_config(tmp_path, name) / "config.json"))
    text = {"text_config": {**config["text_config"], **change}} if "text_config" in config else change
    with pytest.raises(ValueError, match=message):
        build_config(config | text)
