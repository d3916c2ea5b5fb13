"""Whether a device can have numbers of few bits."""

import torch

from engine.formats.fp8 import check_fp8
from wire.names import KvDType, Quantization


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


def check_kv_dtype(kv_dtype: KvDType, device: torch.device) -> None:
    """Raises ValueError if the device has no such numbers."""
    if kv_dtype == "fp8":
        check_fp8(device, "--kv-dtype fp8", "--kv-dtype auto")
