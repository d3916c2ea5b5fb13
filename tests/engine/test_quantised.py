"""Quantised safetensors checkpoints: exact values, groups, loading, shards, refusals and damaged files."""

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.compose import open_model
from engine.formats.fp8 import Fp8Matrix
from engine.formats.groups import Groups
from engine.formats.products import find_fp8
from engine.formats.scheme import read_scheme
from engine.models.assemble import check_tensors
from engine.models.load import choose_dtype
from engine.models.table import build_table
from engine.weights.checkpoint import Checkpoint
from engine.weights.reader import ShardReader
from engine.weights.table import WHOLE, Product, Shard
from tests.support.combinations import examples
from tests.support.quantised import FORMATS, compressed, gptq, write_models

CPU = torch.device("cpu")
NAMES = [*FORMATS, "mxfp4"]
DAMAGED = ["fp8-block", "ct-int8-zeros", "ct-pack4-zeros", "awq", "gptq4", "mxfp4"]  # one of each form
FILE = "model.safetensors"
LAYER = "model.layers.0."
MATRIX = f"{LAYER}mlp.down_proj"  # [128, 192]: blocks of 128 are cut


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Each quantised checkpoint and its plain twin."""
    return {name: write_models(tmp_path_factory.mktemp(name), name) for name in NAMES}


def read(checkpoint: Checkpoint, shard: Shard = WHOLE) -> ShardReader:
    return ShardReader(checkpoint, torch.float32, CPU, lambda *_: None, shard)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_format(models: dict[str, tuple[Path, Path]], name: str) -> None:
    quantised, plain = models[name]
    config, checkpoint = open_model(quantised)
    check_tensors(config, checkpoint)
    stored, expected = load_file(quantised / FILE), load_file(plain / FILE)
    assert checkpoint.entries.keys() == expected.keys()
    for tensor, values in expected.items():
        assert checkpoint.entries[tensor].shape == values.shape
        assert torch.equal(checkpoint.tensor(tensor), values)
        coded = checkpoint.coded(tensor)
        if (tensor in stored and stored[tensor].dtype is values.dtype) or name == "mxfp4":
            assert coded is None
            continue
        assert coded is not None
        format, base = FORMATS[name], tensor.removesuffix("weight")
        left_out = (f"{base}bias", f"{base}input_scale", f"{base}k_scale")
        own = [part for part in stored if part.startswith(base) and part not in left_out]
        assert checkpoint.entries[tensor].dtype == format.dtype
        assert checkpoint.entries[tensor].num_bytes == sum(stored[part].nbytes for part in own)
        groups, matrix = coded.find(Groups), coded.find(Fp8Matrix)
        assert (groups is not None) == format.has_groups
        assert (matrix is not None) == (format.kind == "fp8" and name != "ct-fp8-block")  # whose blocks are others
        if matrix is not None:
            assert torch.equal(matrix.dense(), values) and matrix.codes.dtype is torch.float8_e4m3fn
            assert matrix.scale.ndim == (2 if format.block == (128, 128) and values.shape[1] > 128 else 1)
        if groups is not None:
            assert torch.equal(groups.dense(), values) and groups.bits == format.bits
    assert choose_dtype(checkpoint, "auto", f"{config.prefix}embed_tokens.weight") is torch.float32  # of the embedding


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_parts_of_the_whole(models: dict[str, tuple[Path, Path]], name: str) -> None:
    config, checkpoint = open_model(models[name][0])
    whole, halves = read(checkpoint), [read(checkpoint, Shard(rank, 2)) for rank in range(2)]
    num_grouped = num_fp8 = 0
    for product in (one for one in build_table(config).weights() if isinstance(one, Product)):
        axis, groups, fp8 = int(product.inputs.is_divided), whole.coded(product, Groups), find_fp8(whole, product)
        num_grouped += groups is not None
        for index, weight in enumerate(whole.weights(product)):
            is_cut = axis or product.parts[index].rows.is_divided
            own = [half.weights(product)[index] for half in halves]
            assert torch.equal(torch.cat(own, axis) if is_cut else own[0], weight)
            if groups is not None:
                assert torch.equal(groups[index].dense(), weight)
                cut = [parts[index].dense() for half in halves if (parts := half.coded(product, Groups))]
                assert torch.equal(torch.cat(cut, axis) if is_cut else cut[0], weight)
            if fp8 is not None:
                assert torch.equal(fp8[index].dense(), weight)
                kept = [one[index].dense() for half in halves if (one := find_fp8(half, product))]
                num_fp8 += len(kept)  # of down_proj, 2 * 96 columns, the cut is within a block
                assert not kept or torch.equal(torch.cat(kept, axis) if is_cut else kept[0], weight)
    is_fp8 = name != "mxfp4" and FORMATS[name].kind == "fp8" and name != "ct-fp8-block"
    assert num_fp8 == (0 if not is_fp8 else 12 if FORMATS[name].block == (128, 128) else 14)
    assert num_grouped == (16 if name == "mxfp4" else 4 if FORMATS[name].has_groups else 0)


FP8: dict[str, Any] = {"quant_method": "fp8"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4}
NO_WEIGHTS = {"config_groups": {"group_0": {"weights": None, "input_activations": {"num_bits": 8}}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *(({"quant_method": name}, f"quant_method '{name}' .* supported: fp8, compressed-tensors, awq, gptq, mxfp4")
          for name in ("bitsandbytes", "modelopt")),
        ({"bits": 4}, "quant_method 'None'"),
        ({"quant_method": []}, r"quant_method '\[\]'"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' .* supported: e4m3"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4' .* supported: fp8"),
        (FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size .* two positive integers, not \[0, 128\]"),
        (AWQ | {"version": "gemv"}, "version 'gemv' .* supported: gemm"),
        (AWQ | {"bits": 8}, "bits 8 .* supported: 4"),
        (gptq(2), "bits 2 .* supported: 4, 8"),
        (gptq(4, checkpoint_format="marlin"), "checkpoint_format 'marlin' .* supported: gptq, gptq_v2"),
        (gptq(4, is_marlin_format=True), "is_marlin_format True"),
        (gptq(4, desc_act="yes"), "desc_act must be true or false"),
        (compressed("nvfp4-pack-quantized", type="float", num_bits=4), "'nvfp4-pack-quantized' .* pack-quantized"),
        (compressed("pack-quantized", num_bits=3), "weights 'int 3' in group_0 .* int 4, int 8, float 8"),
        (compressed("float-quantized", type="float", num_bits=4), "weights 'float 4'"),
        (compressed("pack-quantized", num_bits=4, strategy="tensor_group"), "strategy 'tensor_group' in group_0"),
        (compressed("int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (compressed("int-quantized") | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (compressed("int-quantized") | NO_WEIGHTS, "group_0 .* has no weights"),
        (compressed("int-quantized", group_size="x"), "group_size must be an integer from -1"),
        (compressed("int-quantized", strategy="block", block_structure=7), "block_structure .* not 7"),
        (compressed("int-quantized") | {"config_groups": [1]}, "config_groups must be an object"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_scheme(config)


def test_what_says_nothing_of_weights_is_ignored() -> None:
    rest = {"kv_cache_scheme": {"num_bits": 8}, "ignore": ["lm_head"], "sparsity_config": {}, "transform_config": {}}
    scheme = read_scheme(compressed("int-quantized", num_bits=8) | rest)
    assert scheme.method == "compressed-tensors"


def open_with(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)
    read_all(folder)


def read_all(folder: Path) -> None:
    config, checkpoint = open_model(folder)
    check_tensors(config, checkpoint)
    choose_dtype(checkpoint, "auto", f"{config.prefix}embed_tokens.weight")
    for name in checkpoint.entries:
        checkpoint.tensor(name)


DAMAGE: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda tensor: None,
    "another dtype": lambda tensor: torch.zeros(tensor.shape, dtype=torch.int16),
    "one row more": lambda tensor: torch.cat((tensor, tensor[-1:])) if tensor.ndim else None,
    "half the columns": lambda tensor: tensor[..., : tensor.shape[-1] // 2] if tensor.ndim else None,
    "two dimensions more": lambda tensor: tensor.reshape(1, 1, *tensor.shape) if tensor.ndim else None,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", DAMAGED)
def test_tensors_that_do_not_fit_are_named(
    models: dict[str, tuple[Path, Path]], name: str, damage: str, tmp_path: Path
) -> None:
    tensors = load_file(models[name][0] / FILE)
    (tmp_path / "config.json").write_text((models[name][0] / "config.json").read_text())
    base = f"{LAYER}mlp.experts.down_proj_" if name == "mxfp4" else f"{MATRIX}."
    left_out = ("bias", "input_scale", "k_scale")
    for part in [one for one in tensors if one.startswith(base) and not one.endswith(left_out)]:
        changed = DAMAGE[damage](tensors[part])
        if changed is None and part.endswith("g_idx"):
            continue
        rest = {one: tensor for one, tensor in tensors.items() if one != part}
        with pytest.raises(ValueError, match=base):
            open_with(tmp_path, rest if changed is None else rest | {part: changed})


@pytest.mark.parametrize(
    ("name", "part", "value", "said"),
    [
        ("gptq4", "g_idx", torch.full((192,), 3, dtype=torch.int32), r"g_idx has values beyond 0 to 2"),
        ("gptq4", "g_idx", torch.full((192,), -1, dtype=torch.int32), r"g_idx has values beyond 0 to 2"),
        ("gptq4-order", "g_idx", None, r"g_idx is missing"),
        ("gptq4", "scales", torch.zeros(5, 128), r"scales has 5 groups, which do not divide 192 columns"),
        ("ct-pack4-zeros", "weight_zero_point", None, r"weight_zero_point is missing"),
        ("ct-pack4", "weight_shape", torch.tensor([128, 2**62]), r"packed has shape \[128, 24\], which does not hold"),
        ("ct-pack4", "weight_shape", torch.tensor([-128, 192]), r"weight_packed has shape"),
        ("ct-pack4", "weight_scale", torch.zeros(128, 5), r"weight_scale has shape \[128, 5\], which fits no blocks"),
        ("fp8-block", "weight_scale_inv", torch.zeros(2, 2), r"weight_scale_inv has shape \[2, 2\], which fits no"),
        ("awq", "weight", torch.zeros(128, 192), r"weight is there twice: once as .*qweight"),
        ("gptq4", "bias", torch.ones(128), r"unexpected: .*down_proj.bias"),
    ],
)
def test_values_that_do_not_fit_are_named(
    models: dict[str, tuple[Path, Path]], name: str, part: str, value: Tensor | None, said: str, tmp_path: Path
) -> None:
    tensors = load_file(models[name][0] / FILE)
    (tmp_path / "config.json").write_text((models[name][0] / "config.json").read_text())
    tensors.pop(f"{MATRIX}.{part}", None)
    with pytest.raises(ValueError, match=said):
        open_with(tmp_path, tensors | ({} if value is None else {f"{MATRIX}.{part}": value}))


SIZES = st.one_of(st.integers(-2, 300), st.sampled_from([2**31, 2**40, 2**63, 10**30, True, 1.5, "2", None]))
FIELDS: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(st.just("shape"), st.one_of(SIZES, st.lists(SIZES, max_size=4))),
    st.tuples(st.just("dtype"), st.sampled_from(["I8", "I32", "U8", "F8_E4M3", "F16", "F32", "Q4_K", "", 3, [], None])),
    st.tuples(st.just("data_offsets"), st.lists(SIZES, max_size=3)),
)


@settings(max_examples=examples(150), deadline=None, database=None)
@given(data=st.data())
def test_damaged_headers_are_value_errors(models: dict[str, tuple[Path, Path]], data: st.DataObject) -> None:
    source = models[data.draw(st.sampled_from(DAMAGED))][0]
    folder = source.parent / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    raw = (source / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    names = sorted(name for name in header if "proj" in name)
    key, value = data.draw(FIELDS)
    header[data.draw(st.sampled_from(names))][key] = value
    text = json.dumps(header).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with suppress(ValueError):
        read_all(folder)
