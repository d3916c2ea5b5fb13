"""An NVIDIA GPU: Triton's kernels, and FlashInfer's where it has some."""

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist

from engine.attention.choose import AttentionChoice
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.cuda.gpu import Gpu
from engine.cuda.modules import choose_kernels, find_built, find_other_version, pad_head
from engine.cuda.pool import GpuPool
from engine.cuda.toolkit import choose_toolkit, explain_no_compiler
from engine.device import Device
from engine.kv.pool import Pool, PoolShape, PoolShare
from engine.ops.base import Ops
from engine.rank_group import GroupRanks


class CudaDevice(Device):
    """See `Device`."""

    @property
    def ops(self) -> Ops:
        from engine.cuda.ops import CudaOps  # imports Triton

        return CudaOps()

    @property
    def memory_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch).total_memory)

    def pad_head(self, head_dim: int) -> int:
        return pad_head(head_dim)

    def choose_attention(
        self, shape: AttentionShape, windows: Collection[int | None], dtype: torch.dtype, kv_dtype: torch.dtype,
        has_sinks: bool = False,
    ) -> AttentionChoice:  # fmt: skip
        choose_toolkit()
        try:
            from engine.cuda import flashinfer, flashinfer_latents
        except ImportError as error:
            reason = f"FlashInfer cannot be imported ({error}): pip install 'baton[cuda]'"
            return AttentionChoice(TorchSdpaAttention(shape), reason, is_fallback=True)
        if other := find_other_version(flashinfer.VERSION):
            return AttentionChoice(TorchSdpaAttention(shape), other, is_fallback=True)
        if shape.value_dim:
            obstacle = flashinfer_latents.find_latent_obstacle(shape, dtype)
        else:
            obstacle = flashinfer.find_obstacle(shape, dtype, has_sinks)
        if obstacle:
            return AttentionChoice(TorchSdpaAttention(shape), obstacle, is_fallback=True)
        own, kv = (str(one).removeprefix("torch.") for one in (dtype, kv_dtype))
        capability = torch.cuda.get_device_capability(self.torch)
        padded = replace(shape, head_dim=pad_head(shape.head_dim))
        kernels, reason = choose_kernels(
            padded, windows, own, kv, find_built(), capability, explain_no_compiler(), has_sinks
        )
        if not kernels:
            return AttentionChoice(TorchSdpaAttention(shape), reason, is_fallback=True)
        processors = torch.cuda.get_device_properties(self.torch).multi_processor_count
        if shape.value_dim:
            latents = flashinfer_latents.FlashInferLatents(shape, dtype, self.torch, processors, kernels[0])
            return AttentionChoice(latents, reason, is_fallback=False)
        backend = flashinfer.FlashInferAttention(
            shape, frozenset(windows), dtype, self.torch, processors, "fa3" in kernels, kv_dtype if has_sinks else None
        )  # fmt: skip
        return AttentionChoice(backend, reason, is_fallback=False)

    def build_pool(
        self, shape: PoolShape, draft_shape: PoolShape | None = None, share: PoolShare | None = None, lends: bool = True
    ) -> Pool:
        return GpuPool(shape, Gpu(self.torch), draft_shape, share)

    def open_ranks(self, group: dist.ProcessGroup) -> GroupRanks:
        """The exchanges of a group of ranks."""
        from engine.cuda import one_shot  # imports Triton

        return one_shot.open_ranks(group, self.torch, Gpu(self.torch)) or GroupRanks(group)
