"""The device that computes a model. An engine opens one, by engine/compose.py."""

from collections.abc import Collection

import torch

from engine.attention.choose import AttentionChoice
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.kv.pool import Pool, PoolShape, PoolShare
from engine.ops.base import Ops


class Device:
    """Any device, by torch alone. Others: engine/cpu/device.py, engine/cuda/device.py."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    @property
    def ops(self) -> Ops:
        return Ops()

    @property
    def memory_bytes(self) -> int:
        """Memory of its own, not this machine's; 0: none."""
        return 0

    def pad_head(self, head_dim: int) -> int:
        """The dimensions of a head of keys or values in this device's pages; zeros follow its own."""
        return head_dim

    def take(self, model: torch.nn.Module) -> torch.nn.Module:
        """A model of transformers' code, moved here."""
        return model.to(self.torch)

    def choose_attention(
        self, shape: AttentionShape, windows: Collection[int | None], dtype: torch.dtype, kv_dtype: torch.dtype,
        has_sinks: bool = False,
    ) -> AttentionChoice:  # fmt: skip
        """The fastest backend that works for layers with these windows. kv_dtype: of the pages.

        has_sinks: `attend` is called with sinks. Builds kernels on first use (seconds). What is missing leads to a
        fallback, not an error.
        """
        return AttentionChoice(TorchSdpaAttention(shape), f"device is {self.torch.type}", is_fallback=False)

    def build_pool(
        self, shape: PoolShape, draft_shape: PoolShape | None = None, share: PoolShare | None = None, lends: bool = True
    ) -> Pool:
        """See `Pool`."""
        return Pool(shape, draft_shape, share, lends)
