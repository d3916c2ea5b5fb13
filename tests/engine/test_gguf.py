"""GGUF: blocks bit for bit, every architecture against its checkpoint, a folder of its own, and files that lie."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.catalogue import build_config, load_config
from engine.compose import load_model, open_model
from engine.cpu import format as packed
from engine.formats.gguf_blocks import QUANTISED, read_dense, read_groups
from engine.formats.gguf_config import build_config_json
from engine.formats.gguf_file import list_gguf_shards, read_gguf, read_header
from engine.formats.gguf_folder import make_gguf_folder
from engine.formats.groups import Groups
from engine.layers.linear import Quantization
from engine.layers.rope import default_frequencies, llama3_frequencies, longrope_frequencies
from engine.llm import LLM
from engine.weights.fingerprint import weight_fingerprint
from tests.support.attention import needs_compiler
from tests.support.checkpoints import write_checkpoint
from tests.support.combinations import examples
from tests.support.forward import logits_of
from tests.support.gguf_files import HALVES, random_blocks, write_gguf, write_gguf_models

CPU = torch.device("cpu")
SLIDING = ["sliding_attention"] * 3
FAMILIES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama": ("llama", True, {}),
    "qwen2": ("qwen2", False, {}),
    "qwen3": ("qwen3", False, {}),
    "qwen3_moe": ("qwen3moe", False, {"mlp_only_layers": [], "decoder_sparse_step": 1}),
    "gemma2": ("gemma2", False, {"query_pre_attn_scalar": 32}),
    "gemma3_text": ("gemma3", False, {"query_pre_attn_scalar": 32, "layer_types": SLIDING}),
    "granite": ("granite", True, {}),
    "smollm3": ("smollm3", True, {"layers": 4, "no_rope_layers": [1, 1, 1, 0], "sliding_window": None}),
    "olmo2": ("olmo2", False, {}),
}  # tiny checkpoint |-> architecture, whether rows of queries and keys are in pairs, what GGUF cannot say otherwise


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_are_read_bit_for_bit(kind: str) -> None:
    stored = random_blocks(kind, 6, 768, seed=3)
    expected = dequantize(stored, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(read_dense(kind, torch.from_numpy(stored)).numpy(), expected)
    groups = read_groups(kind, torch.from_numpy(stored))
    assert (groups is None) == (kind in ("Q6_K", "Q3_K", "IQ4_XS")) and kind in QUANTISED
    assert groups is None or int(groups.codes.max()) < 1 << groups.bits


def as_folder(path: Path) -> Path:
    """`make_gguf_folder` without a tokenizer."""
    folder = path.parent / "made"
    folder.mkdir()
    header = read_gguf(path)
    (folder / "config.json").write_text(json.dumps(build_config_json(header.metadata, header.entries, {})))
    (folder / "model.gguf").symlink_to(path)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_is_its_family(family: str, tmp_path: Path) -> None:
    """Config and every tensor are those of the checkpoint that was converted."""
    architecture, is_paired, extra = FAMILIES[family]
    plain = write_checkpoint(tmp_path / "plain", family, rope_theta=5e4, **extra)
    made = as_folder(write_gguf(plain, tmp_path / "x.gguf", architecture, is_paired=is_paired))
    (expected, truth), (config, found) = open_model(plain), open_model(made)
    same = (
        "layers ropes norms num_heads num_kv_heads head_dim vocab_size is_tied moe attention_scale attention_softcap "
        "logits_softcap embedding_multiplier residual_multiplier logits_divisor rms_eps context_tokens activation "
        "qk_norm has_qkv_bias"
    )
    for name in same.split():
        one, other = getattr(config, name), getattr(expected, name)
        assert one == (pytest.approx(other, rel=1e-6) if isinstance(other, float) else other), name
    load_model(made, "float32", CPU)  # checks names and shapes
    for name, entry in truth.entries.items():
        tensor, original = found.tensor(name), truth.tensor(name)
        assert tensor.shape == entry.shape == found.entries[name].shape
        if is_paired and ("q_proj" in name or "k_proj" in name):
            original = original.view(-1, 2, config.head_dim // 2, *entry.shape[1:]).transpose(1, 2).flatten(0, 2)
        torch.testing.assert_close(tensor, original, rtol=0, atol=1e-6)  # 1 added and taken away


def test_a_file_is_a_model(tmp_path: Path) -> None:
    """Greedy tokens are those of its values in a plain checkpoint; text, ends and template are the checkpoint's."""
    path, plain = write_gguf_models(tmp_path, "Q4_0")
    folder = make_gguf_folder(path, tmp_path / "cache")
    assert make_gguf_folder(path, tmp_path / "cache") == folder
    theirs, ours = AutoTokenizer.from_pretrained(plain), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("Hello <|end|> wörld") == theirs.encode("Hello <|end|> wörld")
    assert (ours.chat_template, ours.eos_token, ours.bos_token) == (
        theirs.chat_template, theirs.eos_token, theirs.bos_token
    )  # fmt: skip
    prompts = [list(range(2, 40)), [7, 9]]
    found = LLM(str(path), dtype="float32").generate(prompts, max_tokens=8)
    _config, checkpoint = open_model(folder)
    coded = checkpoint.coded("model.layers.0.mlp.down_proj.weight")
    assert coded is not None and coded.find(Groups) is not None
    assert weight_fingerprint(folder, read_header=read_header) != weight_fingerprint(plain)
    assert LLM(str(plain), dtype="float32").generate(prompts, max_tokens=8) == found
    assert LLM(str(path), dtype="bfloat16").generate(prompts[1:], max_tokens=2)  # by kernels for its own codes


@needs_compiler
@pytest.mark.parametrize(("kind", "quantization"), [("Q5_0", "none"), ("Q8_0", "int4"), ("Q4_K_M", "none")])
def test_workers_share_packed_codes(
    kind: str, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache file is written, then mapped; products are those of weights in memory, and near the exact ones."""
    path, plain = write_gguf_models(tmp_path, kind)
    folder, ids = make_gguf_folder(path, tmp_path / "models"), list(range(3, 60))
    own = logits_of(load_model(folder, "bfloat16", CPU, quantization=quantization), ids)
    monkeypatch.setattr(packed, "SMALLEST_FILE_BYTES", 0)
    monkeypatch.setattr(packed, "cache_folder", lambda: tmp_path)
    for _ in range(2):
        decoder = load_model(folder, "bfloat16", CPU, quantization=quantization)
        assert decoder.mapped_bytes and torch.equal(logits_of(decoder, ids), own)
    if quantization == "none":  # as few bits as 8 are asked for: they stay
        assert torch.equal(logits_of(load_model(folder, "auto", CPU, quantization="int8"), ids), own)
    exact = logits_of(load_model(plain, "float32", CPU), ids)
    assert float((own - exact).norm() / exact.norm()) < (0.6 if quantization == "int4" else 0.03)
    assert len(list(tmp_path.glob("*.weights"))) == (2 if quantization == "none" else 1)


# -- files that lie ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    return write_gguf_models(folder, "Q8_0")[0].read_bytes()


def refuse(data: bytes, path: Path) -> str:
    path.write_bytes(data)
    with pytest.raises(ValueError) as told:
        read_gguf(path)
    assert "\n" not in str(told.value) and str(path) in str(told.value)
    return str(told.value)


def test_counts_and_tensors_outside_the_file_or_on_top_of_others_are_refused(whole: bytes, tmp_path: Path) -> None:
    name = b"output_norm.weight"
    at = whole.index(name) + len(name)  # dimensions, shape, type, offset
    shape, offset = at + 4, at + 16
    path = tmp_path / "x.gguf"
    counts = [(place, number, str(number)) for place in (8, 16, 24) for number in (2**64 - 1, 10**8)]
    for place, value, reason in (
        *counts,  # of tensors, keys, bytes of the first key
        (offset, 2**62, "takes"), (offset, 1, "takes"), (offset, 0, "overlap"), (shape, 0, "has shape"),
        (shape, 2**63, "takes"), (shape, 2**30, "takes"),
    ):  # fmt: skip
        assert reason in refuse(whole[:place] + struct.pack("<Q", value) + whole[place + 8 :], path)
    assert "dimensions" in refuse(whole[:at] + struct.pack("<I", 9) + whole[at + 4 :], path)
    assert "is not known" in refuse(whole[: at + 12] + struct.pack("<I", 4711) + whole[at + 16 :], path)
    assert "version" in refuse(whole[:4] + struct.pack("<I", 99) + whole[8:], path)
    for size in (0, 3, 20, 200, len(whole) // 2, len(whole) - 1):
        refuse(whole[:size], path)


@settings(max_examples=examples(150))
@given(data=st.data())
def test_changed_bytes_are_refused_or_read(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 9000))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        header = read_gguf(path)
        build_config_json(header.metadata, header.entries, {})
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert all(entry.begin_bytes + entry.num_bytes <= len(changed) for entry in header.entries.values())


def test_shards_and_architectures_that_are_not_there(whole: bytes, tmp_path: Path) -> None:
    first = tmp_path / "big-00001-of-00002.gguf"
    first.write_bytes(whole.replace(b"llama", b"mambo"))
    with pytest.raises(FileNotFoundError, match=r"one of 2 files, and big-00002-of-00002\.gguf is not beside it"):
        list_gguf_shards(first)
    second = tmp_path / "big-00002-of-00002.gguf"
    second.write_bytes(whole)
    assert list_gguf_shards(first) == [first, second]
    with pytest.raises(ValueError, match="architecture 'mambo' is not supported; supported: llama, qwen2"):
        make_gguf_folder(first, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_factors_of_the_rope_are_part_of_the_config(tmp_path: Path) -> None:
    """Llama 3's scaling is a tensor of factors in a GGUF."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain = write_checkpoint(tmp_path, "llama", rope_scaling={**scaling, "original_max_position_embeddings": 512})
    config = load_config(plain)
    (rope,), size = config.ropes, config.head_dim
    factors = (default_frequencies(rope, size) / llama3_frequencies(rope, size)).tolist()
    header = read_gguf(write_gguf(plain, tmp_path / "x.gguf", "llama", is_paired=True))
    made = build_config(build_config_json(header.metadata, header.entries, {"rope_freqs.weight": factors}))
    torch.testing.assert_close(longrope_frequencies(made.ropes[0], size), llama3_frequencies(rope, size))
    assert made.ropes[0].attention_factor == 1 and made.context_tokens == 2048
