"""The cost of a step and what fits, from a model's shape and a GPU's data sheet. Pure: numbers in, `Costs` out.

Data sheets give peaks. The shares below are assumptions, to be replaced by measured steps.
"""

from dataclasses import dataclass

from bench.gpus import Gpu
from bench.simulate.costs import Costs

BANDWIDTH_SHARE = 0.8  # of the peak, reached when reading weights and KV
FLOPS_SHARE = 0.5  # of the peak, reached by products and attention of prompts together
STEP_S = 0.0005  # per step: launches, sampling, the copy of its tokens
ALL_REDUCE_S = 20e-6  # each, however small
MEMORY_SHARE = 0.9  # of a GPU, used by a worker (runtime/config_parts.py: GPU_SHARE)
RESERVE_BYTES = 2 << 30  # for computing (runtime/hardware.py: GPU_RESERVE_BYTES)
ITEM_BYTES = 2  # bfloat16, weights and KV


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder in numbers."""

    num_weights: int  # all
    num_active: int  # used in a step: all but tables of embeddings
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    query_width: int  # dimensions of all heads of all layers
    kv_width: int  # dimensions of all KV heads of all layers that have their own
    context_tokens: int
    divisible: tuple[int, ...]  # sizes that the ranks of a worker must divide

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.kv_width * ITEM_BYTES

    def can_have(self, tp: int) -> bool:
        """Whether a worker of `tp` ranks can compute it."""
        is_shared = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        return is_shared and all(size % tp == 0 for size in self.divisible)


def build_costs(model: ModelShape, gpu: Gpu, tp: int) -> Costs:
    """Costs of a worker with `tp` ranks."""
    flops = tp * gpu.flops * FLOPS_SHARE
    bandwidth = tp * gpu.bytes_per_s * BANDWIDTH_SHARE
    num_sums = 2 * model.num_layers if tp > 1 else 0
    summed_bytes = num_sums * 2 * (tp - 1) / tp * model.hidden_size * ITEM_BYTES  # a ring sends nearly twice the data
    return Costs(
        step=STEP_S + num_sums * ALL_REDUCE_S,
        row=0.0,
        kv_token=model.kv_token_bytes * num_copies(model, tp) / bandwidth,
        token=2 * model.num_active / flops + summed_bytes / gpu.link_bytes_per_s,
        pair=4 * model.query_width / flops,
        weights=model.num_active * ITEM_BYTES / bandwidth,
    )


def num_copies(model: ModelShape, tp: int) -> int:
    """How many of a worker's ranks hold the same KV."""
    return max(tp // model.num_kv_heads, 1)


def kv_tokens_that_fit(model: ModelShape, gpu: Gpu, tp: int) -> int:
    """KV tokens that fit a worker's pool; 0 or less if not even the weights fit."""
    left_bytes = tp * (gpu.memory_bytes * MEMORY_SHARE - RESERVE_BYTES) - model.num_weights * ITEM_BYTES
    return int(left_bytes / (model.kv_token_bytes * num_copies(model, tp)))


def handoff_token_s(model: ModelShape, gpu: Gpu, tp: int) -> float:
    """Seconds to transfer one token's KV to a decode worker of `tp` ranks, which read in parallel."""
    return model.kv_token_bytes * num_copies(model, tp) / (tp * gpu.handoff_bytes_per_s)
