"""Turns a tiny plain checkpoint into one of each quantised format, and into its plain twin of equal values.

Codes and scales are random. The packers and the dequantised values are built from the formats' descriptions, by other
means than the engine's.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.formats.fp8 import BLOCK, quantise_rows
from tests.support.checkpoints import write_checkpoint

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble of a word |-> column
Tensors = dict[str, Tensor]  # suffix |-> tensor


@dataclass(frozen=True)
class Format:
    """One way to quantise."""

    dtype: str  # of the engine's entries
    config: Mapping[str, Any]  # quantization_config
    write: Callable[["Codes"], Tensors]
    kind: str = "int"  # of the codes; or "fp8"
    bits: int = 8
    block: tuple[int, int] = (1, 32)  # rows, columns; 0: all
    scales: torch.dtype = torch.float16
    has_zeros: bool = False
    has_order: bool = False
    has_groups: bool = True


@dataclass(frozen=True)
class Codes:
    """A random matrix: values = (codes - zeros) * scale."""

    codes: Tensor  # [N, K] int64 from 0 on, or float8
    scale: Tensor  # [R, G]
    zeros: Tensor  # [R, G] int64
    order: Tensor  # [K]: the block of each column
    bits: int
    values: Tensor  # [N, K] float32


def draw(format: Format, num_rows: int, depth: int, generator: torch.Generator) -> Codes:
    rows, columns = (size or whole for size, whole in zip(format.block, (num_rows, depth), strict=True))
    table = (math.ceil(num_rows / rows), math.ceil(depth / columns))
    middle = 1 << format.bits - 1
    scale = (torch.rand(table, generator=generator) + 0.5) * (1.5 / math.sqrt(depth) / middle)
    scale = scale.to(format.scales)
    zeros = torch.full(table, middle)
    if format.has_zeros:
        zeros = torch.randint(1, 2 * middle, table, generator=generator)
    order = torch.arange(depth) // columns
    if format.has_order:
        order = order[torch.randperm(depth, generator=generator)]
    codes = torch.randint(0, 2 * middle, (num_rows, depth), generator=generator)
    if format.kind == "fp8":
        codes, zeros = (torch.randn(num_rows, depth, generator=generator) * 60).to(E4M3), torch.zeros_like(zeros)
    where = (torch.arange(num_rows) // rows)[:, None], order[None, :]
    values = (codes.float() - zeros[where].float()) * scale.float()[where]
    return Codes(codes, scale, zeros, order, format.bits, values)


def pack(codes: Tensor, bits: int) -> Tensor:
    """[n, m] |-> [n, words] int32: the first in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).reshape(len(codes), -1, per_word)
    words = sum(padded[..., place] << bits * place for place in range(per_word))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def signed(codes: Tensor) -> Tensor:
    return (codes - 128).to(torch.int8)


def write_fp8(drawn: Codes) -> Tensors:
    return {".weight": drawn.codes, ".weight_scale_inv": drawn.scale}


def write_fp8_tensor(drawn: Codes) -> Tensors:
    static = {".input_scale": torch.tensor(1.0), ".k_scale": torch.tensor(1.0)}
    return {".weight": drawn.codes, ".weight_scale": drawn.scale[0, 0].clone(), **static}


def write_bytes(drawn: Codes) -> Tensors:
    codes = drawn.codes if drawn.codes.dtype is E4M3 else signed(drawn.codes)
    return {".weight": codes, ".weight_scale": drawn.scale}


def write_bytes_and_zeros(drawn: Codes) -> Tensors:
    return write_bytes(drawn) | {".weight_zero_point": signed(drawn.zeros)}


def write_packed(drawn: Codes) -> Tensors:
    shape = torch.tensor(drawn.codes.shape)
    return {
        ".weight_packed": pack(drawn.codes, drawn.bits), ".weight_scale": drawn.scale, ".weight_shape": shape,
    }  # fmt: skip


def write_packed_and_zeros(drawn: Codes) -> Tensors:
    return write_packed(drawn) | {".weight_zero_point": pack(drawn.zeros.T, drawn.bits).T.contiguous()}


def write_gptq(drawn: Codes, lacking: int = 1) -> Tensors:
    return {
        ".qweight": pack(drawn.codes, drawn.bits).T.contiguous(), ".scales": drawn.scale.T.contiguous(),
        ".qzeros": pack(drawn.zeros.T - lacking, drawn.bits), ".g_idx": drawn.order.int(),
        ".bias": torch.zeros(len(drawn.codes), dtype=torch.float16),
    }  # fmt: skip


def write_gptq_v2(drawn: Codes) -> Tensors:
    return write_gptq(drawn, 0)


def write_awq(drawn: Codes) -> Tensors:
    def order(columns: Tensor) -> Tensor:
        return columns.reshape(len(columns), -1, 8)[..., AWQ_COLUMNS].flatten(1)

    return {
        ".qweight": pack(order(drawn.codes.T), 4), ".qzeros": pack(order(drawn.zeros.T), 4),
        ".scales": drawn.scale.T.contiguous(),
    }  # fmt: skip


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


def gptq(bits: int, **rest: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, **rest}


BF16, F32 = torch.bfloat16, torch.float32
FP8: dict[str, Any] = dict(kind="fp8", has_groups=False)
FLOAT, INT, PACK = (f"{kind}-quantized" for kind in ("float", "int", "pack"))
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
V1, V2 = ({"checkpoint_format": name} for name in ("gptq", "gptq_v2"))
ASYMMETRIC: dict[str, Any] = {"type": "int", "symmetric": False}
CHANNEL: dict[str, Any] = {"strategy": "channel", "group_size": None}
WIDE = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FORMATS: dict[str, Format] = {
    "fp8-block": Format("FP8", WIDE, write_fp8, block=(128, 128), scales=F32, **FP8),
    "fp8-block-e8m0": Format("FP8", WIDE, write_fp8, block=(128, 128), scales=E8M0, **FP8),
    "fp8-tensor": Format("FP8", {"quant_method": "fp8"}, write_fp8_tensor, block=(0, 0), scales=F32, **FP8),
    "fp8-channel": Format("FP8", {"quant_method": "fp8"}, write_bytes, block=(1, 0), scales=BF16, **FP8),
    "ct-fp8-tensor": Format(
        "FP8", compressed(FLOAT, type="float"), write_fp8_tensor, block=(0, 0), scales=BF16, **FP8
    ),
    "ct-fp8-channel": Format(
        "FP8", compressed(FLOAT, type="float", **CHANNEL), write_bytes, block=(1, 0), **FP8
    ),
    "ct-fp8-block": Format(
        "FP8", compressed(FLOAT, type="float", strategy="block", block_structure=[48, 80]), write_bytes,
        block=(48, 80), scales=BF16, **FP8,
    ),
    "ct-int8": Format("INT8", compressed(INT, **CHANNEL), write_bytes, block=(1, 0), scales=BF16),
    "ct-int8-float32": Format(
        "INT8", compressed(INT, **CHANNEL), write_bytes, block=(1, 0), scales=F32, has_groups=False
    ),
    "ct-int8-zeros": Format(
        "INT8", compressed(INT, **ASYMMETRIC, **CHANNEL), write_bytes_and_zeros, block=(1, 0), has_zeros=True
    ),
    "ct-pack4": Format(
        "PACKED4", compressed(PACK, num_bits=4, strategy="group", group_size=64), write_packed, bits=4, block=(1, 64)
    ),
    "ct-pack4-zeros": Format(
        "PACKED4", compressed(PACK, num_bits=4, group_size=32, **ASYMMETRIC), write_packed_and_zeros, bits=4,
        scales=BF16, has_zeros=True,
    ),
    "ct-pack4-channel": Format(
        "PACKED4", compressed(PACK, num_bits=4, group_size=-1, **ASYMMETRIC), write_packed_and_zeros, bits=4,
        block=(1, 0), has_zeros=True,
    ),
    "ct-pack8": Format("PACKED8", compressed(PACK, num_bits=8, **CHANNEL), write_packed, block=(1, 0)),
    "ct-pack8-zeros": Format(
        "PACKED8", compressed(PACK, group_size=32, **ASYMMETRIC), write_packed_and_zeros, scales=BF16, has_zeros=True
    ),
    "awq": Format("AWQ4", AWQ, write_awq, bits=4, has_zeros=True),
    "awq-64": Format("AWQ4", AWQ, write_awq, bits=4, block=(1, 64), has_zeros=True),
    "awq-channel": Format("AWQ4", AWQ, write_awq, bits=4, block=(1, 0), has_zeros=True, scales=BF16),
    "gptq4": Format("GPTQ4", gptq(4, **V1), write_gptq, bits=4, block=(1, 64)),
    "gptq4-zeros": Format("GPTQ4", gptq(4), write_gptq, bits=4, has_zeros=True),
    "gptq4-v2": Format("GPTQ4", gptq(4, **V2), write_gptq_v2, bits=4, has_zeros=True, block=(1, 0)),
    "gptq4-16": Format("GPTQ4", gptq(4), write_gptq, bits=4, has_zeros=True, block=(1, 16), has_groups=False),
    "gptq4-order": Format(
        "GPTQ4", gptq(4, desc_act=True), write_gptq, bits=4, has_zeros=True, has_order=True, has_groups=False
    ),
    "gptq8": Format("GPTQ8", gptq(8, **V1), write_gptq),
    "gptq8-v2": Format("GPTQ8", gptq(8, **V2), write_gptq_v2, has_zeros=True),
}  # fmt: skip


def write_models(folder: Path, name: str, family: str | None = None, **shape: Any) -> tuple[Path, Path]:
    """A quantised checkpoint of one layer, and the plain one of the same values in float32. shape: of its heads.

    family: None: one with biases of some matrices.
    """
    quantised, plain = folder / "quantised", folder / "plain"
    shape = {"layers": 1, "num_heads": 4, "num_kv_heads": 2, **shape}
    write_checkpoint(
        plain, family or ("gpt_oss" if name == "mxfp4" else "qwen2"), hidden=128, intermediate=192, **shape
    )
    shutil.copytree(plain, quantised)
    tensors = load_file(plain / "model.safetensors")
    values, stored, generator = dict(tensors), dict(tensors), torch.Generator().manual_seed(1)
    for module, tensor in tensors.items():
        base = module.removesuffix(".weight")
        if name == "mxfp4" and module.endswith("_proj") and "experts" in module:
            del stored[module]
            values[module], packed = draw_mxfp4(tensor.shape, generator)
            stored |= {module + suffix: part for suffix, part in packed.items()}
        elif name != "mxfp4" and base.endswith(("_proj", "_proj_with_mqa")):
            del stored[module]
            drawn = draw(FORMATS[name], tensor.shape[0], tensor.shape[1], generator)
            values[module] = drawn.values
            parts = FORMATS[name].write(drawn)
            stored = {base + suffix: part for suffix, part in parts.items()} | stored  # its own bias is kept
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"} if name == "mxfp4" else FORMATS[name].config
    (quantised / "config.json").write_text(json.dumps(config))
    save_file({one: tensor.contiguous() for one, tensor in values.items()}, plain / "model.safetensors")
    save_file({one: tensor.contiguous() for one, tensor in stored.items()}, quantised / "model.safetensors")
    return quantised, plain


def draw_mxfp4(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensors]:
    """shape: [E, K, N] of the values."""
    experts, depth, num_rows = shape
    codes = torch.randint(0, 16, (experts, num_rows, depth // 32, 32), generator=generator)
    exponents = torch.randint(119, 124, codes.shape[:3], generator=generator)
    sign = torch.where(codes >= 8, -1.0, 1.0)
    values = sign * FP4[codes % 8] * 2.0 ** (exponents - 127)[..., None]
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    parts = {"_blocks": blocks.to(torch.uint8), "_scales": exponents.to(torch.uint8)}
    return values.flatten(2).transpose(1, 2), parts


def quantise_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows: [T, K], finite, K a multiple of BLOCK |-> codes [T, K] e4m3, scale [T, K / BLOCK]: see `quantise_rows`.

    A twin of what a GPU's kernel does.
    """
    codes, scale = quantise_rows(rows.reshape(-1, BLOCK))
    return codes.view(rows.shape), scale.view(len(rows), -1)
