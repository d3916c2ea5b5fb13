"""Completes the core: the one file that names satellites. Each row of a table, and each import, is one of them."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from engine.adapters.ops import AdapterOps
from engine.adapters.slots import NO_ADAPTERS, AdapterLimits, Adapters
from engine.attention import choose
from engine.attention.choose import AttentionChoice
from engine.attention.shape import AttentionShape
from engine.cpu.device import CpuDevice
from engine.cpu.format import PackedFormat
from engine.cuda.device import CudaDevice
from engine.device import Device
from engine.experts.build import build_mixture
from engine.formats.fp8 import check_fp8
from engine.formats.gguf import open_gguf
from engine.formats.gguf_folder import gguf_cache, make_gguf_folder
from engine.formats.products import Fp8Format, GpuFormat, Int8Format
from engine.formats.quantised import decode
from engine.heads import load as heads
from engine.heads.decoder import HeadDecoder
from engine.hybrids.mixers import build_mixer
from engine.layers.additions import NO_ADDITIONS, Additions
from engine.layers.linear import Quantization
from engine.models import load
from engine.models.assemble import LayerParts
from engine.models.config import FallbackConfig, ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import DTYPES, Parts, check_dtype
from engine.models.read_config import has_native_code, load_config
from engine.ops.base import Ops
from engine.ranks import ONE_RANK, Ranks
from engine.weights.cache import Weights
from engine.weights.checkpoint import Checkpoint, SafetensorsCheckpoint
from engine.weights.formats import PlainFormat
from engine.weights.reader import OnProgress, ShardReader
from wire.files import check_folder, read_json_object
from wire.kv_layout import KvPart

DEVICES: Mapping[str, type[Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}  # torch's name |-> kind; others: Device


def open_device(device: torch.device) -> Device:
    return DEVICES.get(device.type, Device)(device)


def choose_format(reader: ShardReader, ops: Ops, quantization: Quantization, weights: Weights | None) -> PlainFormat:
    """weights: memory for packed ones; None: they are not packed. In float32, a file's codes become floats."""
    if weights is not None:
        return PackedFormat(reader, ops, weights, quantization)
    if quantization == "int8":
        return Int8Format(reader, ops)
    if quantization == "fp8":
        return Fp8Format(reader, ops)
    is_coded = reader.device.type == "cuda" and reader.dtype is not torch.float32
    return GpuFormat(reader, ops, quantization) if is_coded else PlainFormat(reader, ops)


LAYER_PARTS = LayerParts(build_mixer, build_mixture)
PARTS = Parts(
    LAYER_PARTS, choose_format, open_gguf, decode,
    lambda path: make_gguf_folder(path, gguf_cache()),
)  # fmt: skip
open_model = partial(load.open_model, parts=PARTS)
resolve_model_folder = partial(load.resolve_model_folder, parts=PARTS)


def choose_attention(
    shape: AttentionShape, windows: Collection[int | None], device: torch.device, dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None, has_sinks: bool = False,
) -> AttentionChoice:  # fmt: skip
    """See `Device`. kv_dtype: None: `dtype`."""
    return open_device(device).choose_attention(shape, windows, dtype, kv_dtype or dtype, has_sinks)


def choose_for_layers(
    shapes: Sequence[AttentionShape], windows: Sequence[int | None], page_tokens: int, device: torch.device,
    dtype: torch.dtype, kv_dtype: torch.dtype | None = None, has_sinks: bool = False,
) -> AttentionChoice:  # fmt: skip
    """For a model with these shapes and windows of layers."""
    pick = partial(choose_attention, device=device, dtype=dtype, kv_dtype=kv_dtype, has_sinks=has_sinks)
    return choose.choose_for_layers(pick, shapes, windows, page_tokens)


def load_any_config(folder: Path) -> ModelConfig | FallbackConfig:
    """`load_config` for any model. Without native code: by transformers on the meta device, in seconds."""
    if has_native_code(folder):
        return load_config(folder)
    from engine.fallback.probe import probe

    return probe(folder)


def open_any_model(folder: Path) -> tuple[ModelConfig | FallbackConfig, Checkpoint]:
    """`open_model` for any model. Without native code: by transformers on the meta device, in seconds."""
    return open_model(folder) if has_native_code(folder) else (load_any_config(folder), SafetensorsCheckpoint(folder))


def load_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    on_progress: OnProgress | None = None,
    quantization: Quantization = "none",
    ranks: Ranks = ONE_RANK,
    adapter_limits: AdapterLimits = NO_ADAPTERS,
    has_mtp: bool = False,
    max_context_tokens: int = 0,
) -> Decoder:
    """See `models.load.load_model`; any model, in any format.

    Raises ValueError also for a device that does not support such weights. has_mtp: `load_head` follows, with the
    model's own layer.
    """
    check_quantization(quantization, dtype, device)
    check_folder(folder)
    opened = open_device(device)
    if not has_native_code(folder):
        if adapter_limits.num_slots:
            raise ValueError(f"{folder}: models without code of Baton's own take no adapters; set --max-loras 0")
        return _load_without_native_code(folder, dtype, opened, on_progress, quantization, ranks, has_mtp)

    def add(dtype: torch.dtype) -> Additions:
        if not adapter_limits.num_slots:
            return NO_ADDITIONS
        return Adapters(*adapter_limits, dtype, device, opened.ops.find(AdapterOps))

    return load.load_model(folder, dtype, opened, PARTS, on_progress, quantization, ranks, max_context_tokens, add)


def load_head(
    folder: Path, model: Decoder, quantization: Quantization, *, is_mtp: bool
) -> tuple[HeadDecoder, tuple[KvPart, ...]]:
    """See `heads.load.load_head`."""
    device = open_device(model.device)
    return heads.load_head(folder, model, device, quantization, PARTS, _build_fallback_head, is_mtp=is_mtp)


def _build_fallback_head(config: ModelConfig, checkpoint: Checkpoint, model: Decoder) -> HeadDecoder:
    from engine.fallback.head import build_fallback_head  # imports transformers

    return build_fallback_head(config, checkpoint, cast(Any, model))


def _load_without_native_code(
    folder: Path, dtype: str, device: Device, on_progress: OnProgress | None, quantization: Quantization,
    ranks: Ranks, has_mtp: bool,
) -> Decoder:  # fmt: skip
    """By transformers' code. The result has the interface of a Decoder."""
    lacking = f"Baton has no code for model_type {read_json_object(folder / 'config.json').get('model_type')!r}"
    if ranks.size > 1:
        raise ValueError(f"{lacking}, so only one rank can compute it: set --tp 1")
    if quantization != "none":
        raise ValueError(f"{lacking}, so its weights cannot be rounded: set --quantization none")
    if dtype != "auto":
        check_dtype(dtype)
    from engine.fallback.load import load_fallback  # imports transformers, seconds

    return cast(Decoder, load_fallback(folder, DTYPES.get(dtype), device, on_progress, has_mtp))


def check_quantization(quantization: Quantization, dtype: str, device: torch.device) -> None:
    """Raises ValueError if the device or dtype does not support it."""
    if quantization == "fp8":
        check_fp8(device)
    if quantization == "int8" and device.type != "cpu":
        raise ValueError("--quantization int8 is for CPUs: use --quantization fp8 or int4 on a GPU, or --device cpu")
    if quantization in ("int8", "int4") and dtype not in ("auto", "bfloat16"):
        raise ValueError(
            f"--quantization {quantization} computes in bfloat16, not {dtype}: set --dtype bfloat16 or auto"
        )
