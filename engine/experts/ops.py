"""The kernels of a mixture of experts, where a device has some."""

from typing import Any

from engine.ops.base import Ops

SLOT_TILES = (
    16,
    64,
)  # rows that an expert multiplies at once on a GPU: where it has up to so many on average, and more


class ExpertOps(Ops):
    """See `experts.moe.GroupedExperts`."""

    expert_kernels: Any = None  # cuda.gpu_experts on a GPU
