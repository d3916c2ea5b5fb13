"""The cost of a step and what fits, from a model's shape and a GPU's data sheet. Pure: numbers in, `Costs` out.

Data sheets give peaks. The shares below are assumptions, to be replaced by measured steps.
"""

from bench.simulate.costs import Costs
from runtime.config_parts import GPU_SHARE
from runtime.gpus import Card
from worker.limits import (
    BANDWIDTH_SHARE,
    FLOPS_SHARE,
    ITEM_BYTES,
    SLOTS_EACH,
    SLOTS_SHARE,
    Limits,
    ModelShape,
    estimate_room,
)

STEP_S = 0.0005  # per step: launches, sampling, the copy of its tokens
ALL_REDUCE_S = 20e-6  # each, however small


def build_costs(model: ModelShape, gpu: Card, tp: int) -> Costs:
    """Costs of a worker with `tp` ranks."""
    flops = tp * gpu.flops * FLOPS_SHARE
    bandwidth = tp * gpu.bytes_per_s * BANDWIDTH_SHARE
    num_sums = 2 * model.num_layers if tp > 1 else 0
    summed_bytes = num_sums * 2 * (tp - 1) / tp * model.hidden_size * ITEM_BYTES  # a ring sends nearly twice the data
    return Costs(
        step=STEP_S + num_sums * ALL_REDUCE_S,
        row=2 * model.slot_bytes / bandwidth,  # its states are read and written
        kv_token=model.kv_token_bytes_of(tp) * tp / bandwidth,
        token=2 * model.num_active / flops + summed_bytes / gpu.link_bytes_per_s,
        pair=4 * model.query_width / flops,
        weights=model.num_active * model.weight_bytes / bandwidth,
    )


def kv_tokens_that_fit(model: ModelShape, gpu: Card, tp: int, limits: Limits) -> int:
    """KV tokens that fit a worker's pool beside its slots; 0 if not even the weights fit."""
    left_bytes = estimate_room(model, limits, gpu.memory_bytes, tp).left_bytes(GPU_SHARE)
    states_bytes = min((SLOTS_EACH * limits.max_running + 1) * model.slot_bytes_of(tp), int(left_bytes * SLOTS_SHARE))
    return (left_bytes - states_bytes) // model.kv_token_bytes_of(tp)


def handoff_token_s(model: ModelShape, gpu: Card, tp: int) -> float:
    """Seconds to transfer one token's KV to a decode worker of `tp` ranks, which read in parallel."""
    return model.kv_token_bytes_of(tp) / gpu.handoff_bytes_per_s
