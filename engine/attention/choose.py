"""Which attention backend runs on this device, and why."""

from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.cpu_paged import CpuPagedAttention
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.kernels.build import BuildError, load_kernel


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend and the reason for it, one line for the log. A fallback is worth a warning."""

    backend: AttentionBackend
    reason: str
    is_fallback: bool  # a faster backend exists for this device but cannot be used here


def choose_attention(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> AttentionChoice:
    """The fastest backend that works. Builds the CPU kernel on first use (seconds); no compiler is no error."""
    if device.type != "cpu":
        return AttentionChoice(TorchSdpaAttention(shape), f"device is {device.type}", is_fallback=False)
    if dtype not in (torch.float32, torch.bfloat16):
        return AttentionChoice(TorchSdpaAttention(shape), f"the CPU kernel has no {dtype}", is_fallback=True)
    try:
        backend = CpuPagedAttention(shape, load_kernel("cpu_paged"))
    except BuildError as error:
        return AttentionChoice(TorchSdpaAttention(shape), str(error), is_fallback=True)
    return AttentionChoice(backend, f"CPU kernel, {backend.instructions}", is_fallback=False)
