"""The format of a model's weights: what the device, the dtype and `--quantization` make of a checkpoint."""

import torch

from engine.layers.linear import Quantization
from engine.ops.base import Ops
from engine.weights.cache import Weights
from engine.weights.formats import Int8Format, PackedFormat, PlainFormat
from engine.weights.gpu_formats import Fp8Format, GpuFormat
from engine.weights.reader import Reader


def choose_format(reader: Reader, ops: Ops, quantization: Quantization, weights: Weights | None) -> PlainFormat:
    """weights: memory for packed ones; None: they are not packed. In float32, a file's codes become floats."""
    if weights is not None:
        return PackedFormat(reader, ops, weights, quantization)
    if quantization == "int8":
        return Int8Format(reader, ops)
    if quantization == "fp8":
        return Fp8Format(reader, ops)
    is_coded = reader.device.type == "cuda" and reader.dtype is not torch.float32
    return GpuFormat(reader, ops, quantization) if is_coded else PlainFormat(reader, ops)
