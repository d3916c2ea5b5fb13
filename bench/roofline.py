"""The cost of a step and what fits, from a model's shape and a GPU's data sheet. Pure: numbers in, `Costs` out.

Data sheets give peaks. The shares below are assumptions, to be replaced by measured steps.
"""

from collections.abc import Mapping
from typing import Any

from bench.simulate.costs import Costs
from runtime.config_parts import GPU_SHARE
from runtime.gpus import Card
from worker.startup.limits import (
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


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> Mapping[str, Any]:
    """A config.json."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }


SHAPES = {
    "1B": llama(2048, 8192, 16, 32, 8, 128_256, True),  # Llama-3.2-1B
    "3B": llama(3072, 8192, 28, 24, 8, 128_256, True),  # Llama-3.2-3B
    "8B": llama(4096, 14336, 32, 32, 8, 128_256, False),  # Llama-3-8B
    "70B": llama(8192, 28672, 80, 64, 8, 128_256, False),  # Llama-3-70B
    "tiny": llama(256, 512, 2, 4, 2, 1024, True),
}


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
