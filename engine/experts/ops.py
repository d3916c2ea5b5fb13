"""The kernels of a mixture of experts, where a device has some."""

from typing import Any

from engine.ops.base import Ops


class ExpertOps(Ops):
    """See `experts.moe.GroupedExperts`."""

    expert_kernels: Any = None  # cuda.gpu_experts on a GPU
