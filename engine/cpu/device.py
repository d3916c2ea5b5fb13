"""A CPU: C++ kernels where a compiler can build them, else torch."""

from collections.abc import Collection

import torch

from engine.attention.choose import AttentionChoice
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.cpu.build import BuildError, load_kernel
from engine.cpu.cpu_layers import load
from engine.cpu.cpu_math import choose_math, describe_math
from engine.cpu.cpu_paged import CpuPagedAttention
from engine.cpu.cpu_sampling import load_cpu_sampling
from engine.cpu.floats import is_faster, use_floats
from engine.cpu.ops import CpuOps
from engine.device import Device
from engine.ops.base import Ops


class CpuDevice(Device):
    """See `Device`."""

    @property
    def ops(self) -> Ops:
        if load() is None:
            load_cpu_sampling()  # which says so in the log
            return Ops()
        return CpuOps()

    def take(self, model: torch.nn.Module) -> torch.nn.Module:
        if is_faster():
            use_floats(model)
        return super().take(model)

    def choose_attention(
        self, shape: AttentionShape, windows: Collection[int | None], dtype: torch.dtype, kv_dtype: torch.dtype,
        has_sinks: bool = False,
    ) -> AttentionChoice:  # fmt: skip
        if unknown := {dtype, kv_dtype} - {torch.float32, torch.bfloat16}:
            reason = f"the CPU kernel has no {unknown.pop()}"
            return AttentionChoice(TorchSdpaAttention(shape), reason, is_fallback=True)
        try:
            backend = CpuPagedAttention(shape, load_kernel("cpu_paged"), choose_math())
        except BuildError as error:
            return AttentionChoice(TorchSdpaAttention(shape), str(error), is_fallback=True)
        return AttentionChoice(backend, f"CPU kernel, {describe_math()}", is_fallback=False)
