"""Config, checkpoint files, loading, fingerprint: what is read, what is refused, and the messages of refusals."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.catalogue import build_config, load_config
from engine.compose import load_model, resolve_model_folder
from engine.cpu.floats import FloatLinear
from engine.layer_config import ROPE_KINDS
from engine.layers.linear import WidenedLinear
from engine.layers.rope import FREQUENCIES, build_rope_table
from engine.weights import fingerprint
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.fingerprint import weight_fingerprint
from tests.support.checkpoints import write_checkpoint
from tests.support.forward import logits_of

CPU = torch.device("cpu")
VOCAB = 300
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}

BASE: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
MISTRAL: dict[str, Any] = BASE | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN: dict[str, Any] = BASE | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
GEMMA4: dict[str, Any] = BASE | {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "global_head_dim": 32,
    "num_key_value_heads": 2, "vocab_size_per_layer_input": 300, "moe_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "attention_factor"),
    [
        ({"type": "linear", "factor": 2.0}, 1.0),
        ({"rope_type": "llama3", **LLAMA3}, 1.0),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, None),
        ({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False}, None),
        ({"type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25}, 1.25),
    ],
)
def test_old_and_new_rope_keys_agree(scaling: dict[str, Any], attention_factor: float | None) -> None:
    old = build_config(BASE | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = build_config(BASE | {"rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old == new
    theirs: Any = AutoConfig.for_model(**BASE, rope_theta=5e5, rope_scaling=dict(scaling))
    frequencies, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, CPU)
    rope = old.ropes[0]
    torch.testing.assert_close(FREQUENCIES[rope.kind](rope, old.head_dim), frequencies, rtol=0, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor or factor)
    positions = torch.arange(old.context_tokens)
    expected = LlamaRotaryEmbedding(theirs)(torch.empty(1), positions[None])  # cos and sin
    for found, twin in zip(build_rope_table(rope, old.head_dim, len(positions)).unbind(1), expected, strict=True):
        torch.testing.assert_close(found, twin[0, :, : old.head_dim // 2], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'.*supported: llama, mistral, qwen2, qwen3"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification.*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*'silu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*default, linear, llama3, yarn, longrope"),
        ({"rope_scaling": {"type": "linear"}}, "needs a `factor`"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "3 does not divide num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_size": "64"}, r"hidden_size must be an integer from 1 to 1048576, not '64'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number .* not nan"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be an integer from 1 .* not 0"),
        (QWEN | {"use_sliding_window": True, "sliding_window": True}, "sliding_window must be an integer .* not True"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "factor": 0}}, "factor must be a number above 0 .* not 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor must be a number above 0 .* not nan"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number .* not inf"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta must be a number .* not 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, not 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number above 0 .* not '2'"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": None}}, "original_max_.* not None"),
        ({"quantization_config": "x"}, "quantization_config must be an object, not 'x'"),
        (QWEN | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (QWEN | {"layer_types": ["full_attention"]}, "1 entries for num_hidden_layers 4"),
        (QWEN | {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        (QWEN | {"layer_types": 4}, "layer_types must be a list, not 4"),
        (QWEN | {"use_sliding_window": "no"}, "use_sliding_window must be true or false, not 'no'"),
    ],
)
def test_unsupported_configs_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(BASE | change)


@pytest.mark.parametrize(
    "key",
    [
        "head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types",
        "architectures", "quantization_config",
    ],
)  # fmt: skip
def test_null_is_absent_where_transformers_says_so(key: str) -> None:
    assert build_config(BASE | {key: None}) == build_config({name: BASE[name] for name in BASE if name != key})


VALUES = [None, True, 0, -1, 1, 2, 10**400, 0.0, 0.5, float("nan"), float("inf"), "", "yarn", [], [1], {}, {"a": 1}]
ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
    "partial_rotary_factor",
)  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [BASE, MISTRAL, QWEN | {"use_sliding_window": True}, GEMMA4],
    ids=["llama", "mistral", "qwen2", "gemma4"],
)
def test_any_value_loads_or_is_refused(model: dict[str, Any]) -> None:
    keys = {
        *model, "architectures", "hidden_act", "head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta",
        "tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types",
        "max_window_layers", "rope_scaling", "rope_parameters", "partial_rotary_factor", "quantization_config",
        "per_layer_config", "num_kv_shared_layers", "attention_k_eq_v", "num_global_key_value_heads", "global_head_dim",
        "enable_moe_block", "num_experts", "top_k_experts", "hidden_size_per_layer_input", "use_double_wide_mlp",
    }  # fmt: skip
    changes: list[dict[str, Any]] = [{key: value} for key in keys for value in VALUES]
    assert tuple(FREQUENCIES) == ROPE_KINDS
    for kind in ROPE_KINDS:
        rope = {"type": kind, **LLAMA3}
        changes += [{"rope_scaling": {**rope, key: value}} for key in ROPE_KEYS for value in VALUES]
    for change in changes:
        with suppress(ValueError):
            config = build_config(model | change)
            assert FREQUENCIES[config.ropes[0].kind](config.ropes[0], config.head_dim).isfinite().all(), change


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "llama", vocab=VOCAB, layers=2)


def edit_weights(folder: Path, edit: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a single-file checkpoint."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in edit.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model.norm.weight": None}, r"missing: model.norm.weight, expected shape \[128\]"),
        ({"model.layers.1.mlp.up_proj.weight": None}, r"missing: model.layers.1.mlp.up_proj.weight.*\[256, 128\]"),
        ({"lm_head.weight": None}, "missing: lm_head.weight"),
        ({"model.norm.bias": torch.zeros(128)}, r"unexpected: model.norm.bias, shape \[128\]"),
        ({"model.norm.weight": torch.ones(64)}, r"model.norm.weight has shape \[64\], config.json implies \[128\]"),
        ({"model.norm.weight": torch.ones(128, dtype=torch.int8)}, "model.norm.weight is stored as I8; supported: F32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, edit: dict[str, Tensor | None], message: str) -> None:
    edit_weights(folder, edit)
    with pytest.raises(ValueError, match=message):
        load_model(folder, "auto", CPU)


def test_damaged_files_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:-1], "truncated: its header describes .* bytes"),
        (whole[:1000], "truncated"),
        (whole[:5], "truncated or not a safetensors file: 5 bytes"),
        (whole + b"x", "longer than its header says"),
        ((10).to_bytes(8, "little") + b"not json..", "not valid JSON"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"model.safetensors.*{message}"):
            load_model(folder, "auto", CPU)


def test_missing_and_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype 'int4' is not supported; supported: auto, float32"):
        load_model(folder, "int4", CPU)
    index = folder / "model.safetensors.index.json"
    for text, error, message in (
        ('{"weight_map": {"a": "gone.safetensors"}}', FileNotFoundError, "gone.safetensors"),
        ('{"weight_map": {"a": "../model.safetensors"}}', ValueError, "not a plain file name"),
        ("{}", ValueError, "not a safetensors index"),
    ):
        index.write_text(text)
        with pytest.raises(error, match=message):
            load_model(folder, "auto", CPU)
    index.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        load_model(folder, "auto", CPU)
    for text in ("{", "[" * 100_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
            load_config(folder)
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path)


def test_loading_maps_counts_and_ignores(folder: Path) -> None:
    edit_weights(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)})
    progress: list[tuple[int, int]] = []
    decoder = load_model(folder, "auto", CPU, lambda done, total: progress.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert decoder.dtype == torch.float32
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)
    checkpoint = SafetensorsCheckpoint(folder)
    first, again = (checkpoint.tensor("model.norm.weight", is_kept=True) for _ in range(2))
    assert first.data_ptr() == again.data_ptr()  # one mapping, no copies


def test_tied_copies_are_shared_and_differing_ones_kept(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", vocab=VOCAB, tied=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    ids = [5, 7, 9]
    plain = logits_of(load_model(folder, "auto", CPU), ids)
    edit_weights(folder, {"lm_head.weight": embedding.clone()})
    decoder = load_model(folder, "auto", CPU)
    torch.testing.assert_close(logits_of(decoder, ids), plain)
    assert isinstance(decoder.lm_head, WidenedLinear | FloatLinear)
    assert decoder.lm_head.weight is decoder.embedding.weight
    edit_weights(folder, {"lm_head.weight": 2 * embedding})
    torch.testing.assert_close(logits_of(load_model(folder, "auto", CPU), ids), 2 * plain)


def test_fingerprint(folder: Path, tmp_path: Path) -> None:
    original = weight_fingerprint(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert weight_fingerprint(copy) == original
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert weight_fingerprint(copy) == original
    for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
        tensor = load_file(folder / "model.safetensors")[name]
        edit_weights(copy, {name: tensor * 1.01})
        assert weight_fingerprint(copy) != original
        edit_weights(copy, {name: tensor})
        assert weight_fingerprint(copy) == original
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    assert weight_fingerprint(copy) != original


def test_a_fingerprint_is_of_every_value(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where digests of large files are kept: a file that was written since has other ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fingerprint, "SMALLEST_FILE_BYTES", 0)
    copy = shutil.copytree(folder, tmp_path / "copy")
    embedding = load_file(copy / "model.safetensors")["model.embed_tokens.weight"]
    found = {weight_fingerprint(copy)}
    for row in (7, 150):
        edited = embedding.clone()
        edited[row, 5] += 1
        edit_weights(copy, {"model.embed_tokens.weight": edited})
        found.add(weight_fingerprint(copy))
    (copy / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    found.add(weight_fingerprint(copy))
    monkeypatch.setattr(fingerprint, "KV_VERSION", fingerprint.KV_VERSION + 1)
    found.add(weight_fingerprint(copy))
    assert len(found) == 5


def test_a_large_file_is_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = weight_fingerprint(folder)
    monkeypatch.setattr(fingerprint, "SMALLEST_FILE_BYTES", 0)
    assert weight_fingerprint(folder) == plain
    (kept,) = (tmp_path / "baton").glob("*.digests")
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_digest", None)
        assert weight_fingerprint(folder) == plain
    kept.write_bytes(kept.read_bytes()[:-9])  # a damaged one is written again
    assert weight_fingerprint(folder) == plain == weight_fingerprint(folder)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        assert weight_fingerprint(folder) == plain


def test_fingerprint_does_not_see_sharding(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one", "qwen3")
    three = write_checkpoint(tmp_path / "three", "qwen3", shards=3)
    assert weight_fingerprint(one) == weight_fingerprint(three)


def test_resolve_model_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **_: object) -> str:
        raise ConnectionError(f"no route for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert resolve_model_folder(str(folder)) == folder
    with pytest.raises(FileNotFoundError, match="'/no/such/folder' does not exist"):
        resolve_model_folder("/no/such/folder")
    with pytest.raises(FileNotFoundError, match=r"no route for some/model.*Offline: copy"):
        resolve_model_folder("some/model")
