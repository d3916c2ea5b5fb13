"""Picks the attention backend for a device."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention.base import AttentionBackend
from engine.attention.layered import LayeredAttention
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.cpu.build import BuildError, load_kernel
from engine.cpu.cpu_math import choose_math, describe_math
from engine.cpu.cpu_paged import CpuPagedAttention
from engine.cuda.modules import choose_kernels, explain_no_compiler, find_built


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend and the reason for it, one line for the log. A fallback deserves a warning."""

    backend: AttentionBackend
    reason: str
    is_fallback: bool  # this device has a faster backend, which cannot be used here


def choose_for_layers(
    shapes: Sequence[AttentionShape],
    windows: Sequence[int | None],
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    has_sinks: bool = False,
) -> AttentionChoice:
    """`choose_attention` for a model with these shapes and windows of layers."""
    choices = []
    for shape in dict.fromkeys(shapes):
        own = [window for one, window in zip(shapes, windows, strict=True) if one == shape]
        choices.append(choose_attention(shape, own, device, dtype, kv_dtype, has_sinks))
    if len(choices) == 1:
        return choices[0]
    worst = max(choices, key=lambda choice: choice.is_fallback)
    return replace(worst, backend=LayeredAttention(shapes, [choice.backend for choice in choices], page_tokens))


def choose_attention(
    shape: AttentionShape,
    windows: Collection[int | None],
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    has_sinks: bool = False,
) -> AttentionChoice:
    """The fastest backend that works for layers with these windows. kv_dtype: dtype of the pages; None: `dtype`.
    has_sinks: `attend` is called with sinks.

    Builds the CPU kernel on first use (seconds). A missing compiler or FlashInfer, or no FlashInfer modules for this
    GPU, leads to a fallback, not an error.
    """
    if device.type == "cuda":
        return _choose_for_gpu(shape, windows, device, dtype, kv_dtype or dtype, has_sinks)
    if device.type != "cpu":
        return AttentionChoice(TorchSdpaAttention(shape), f"device is {device.type}", is_fallback=False)
    if unknown := {dtype, kv_dtype or dtype} - {torch.float32, torch.bfloat16}:
        return AttentionChoice(TorchSdpaAttention(shape), f"the CPU kernel has no {unknown.pop()}", is_fallback=True)
    try:
        backend = CpuPagedAttention(shape, load_kernel("cpu_paged"), choose_math())
    except BuildError as error:
        return AttentionChoice(TorchSdpaAttention(shape), str(error), is_fallback=True)
    return AttentionChoice(backend, f"CPU kernel, {describe_math()}", is_fallback=False)


def reference_attention(shapes: Sequence[AttentionShape], page_tokens: int) -> AttentionBackend:
    """torch_sdpa for layers of these shapes."""
    backends = [TorchSdpaAttention(shape) for shape in dict.fromkeys(shapes)]
    return backends[0] if len(backends) == 1 else LayeredAttention(shapes, backends, page_tokens)


def _choose_for_gpu(
    shape: AttentionShape, windows: Collection[int | None], device: torch.device, dtype: torch.dtype,
    kv_dtype: torch.dtype, has_sinks: bool,
) -> AttentionChoice:  # fmt: skip
    try:
        from engine.cuda import flashinfer
    except ImportError as error:
        reason = f"FlashInfer cannot be imported ({error}): pip install 'baton[cuda]'"
        return AttentionChoice(TorchSdpaAttention(shape), reason, is_fallback=True)
    if obstacle := flashinfer.find_obstacle(shape, dtype, has_sinks):
        return AttentionChoice(TorchSdpaAttention(shape), obstacle, is_fallback=True)
    own, kv = (str(one).removeprefix("torch.") for one in (dtype, kv_dtype))
    capability = torch.cuda.get_device_capability(device)
    kernels, reason = choose_kernels(shape, windows, own, kv, find_built(), capability, explain_no_compiler())
    if not kernels:
        return AttentionChoice(TorchSdpaAttention(shape), reason, is_fallback=True)
    backend = flashinfer.FlashInferAttention(shape, frozenset(windows), dtype, device, "fa3" in kernels)
    return AttentionChoice(backend, reason, is_fallback=False)
