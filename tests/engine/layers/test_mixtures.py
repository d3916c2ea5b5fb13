"""`MixtureOfExperts` against the blocks of transformers that have the same weights."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from engine.layers.config import Routing
from engine.layers.moe import MixtureOfExperts
from tests.engine.layers.families import HIDDEN, WIDTH, build, randn
from tests.engine.layers.stacked import WAYS, Stacked
from tests.engine.layers.test_routing import FAMILIES

ROWS = 5
BLOCKS = {
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",  # a shared expert with a gate
    "mixtral": "MixtralSparseMoeBlock",
    "deepseek_v3": "DeepseekV3MoE",
    "gpt_oss": "GptOssMLP",
}


def stack(name: str, experts: Any) -> Stacked:
    if name != "gpt_oss":
        return Stacked("silu", experts.gate_up_proj, experts.down_proj)
    gate_up, down = experts.gate_up_proj.mT.contiguous(), experts.down_proj.mT.contiguous()
    order = torch.arange(2 * WIDTH).view(-1, 2).T.flatten()  # of gates and ups, which alternate
    bias = experts.gate_up_proj_bias[:, order].contiguous()
    return Stacked("clamped", gate_up[:, order].contiguous(), down, bias, experts.down_proj_bias)


def build_like(name: str, block: Any, routing: Routing, way: str) -> MixtureOfExperts:
    router = getattr(block, "gate", None) or block.router
    return MixtureOfExperts(
        lambda rows: functional.linear(rows, router.weight, getattr(router, "bias", None)),
        routing,
        stack(name, block.experts).make(way),
        bias=getattr(router, "e_score_correction_bias", None),
        shared=getattr(block, "shared_expert", getattr(block, "shared_experts", None)),
        shared_gate=getattr(block, "shared_expert_gate", None),
    )


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BLOCKS)
def test_mixtures_are_those_of_transformers(name: str, way: str) -> None:
    routing = FAMILIES["qwen3_moe" if name == "qwen2_moe" else name].routing
    block, rows = build(f"{name}:{BLOCKS[name]}", routing), 4 * randn(ROWS, HIDDEN, seed=11)
    found = block(rows[None])
    expected = found[0] if isinstance(found, tuple) else found
    mixed = build_like(name, block, routing, way)(rows)
    torch.testing.assert_close(mixed, expected.view(ROWS, HIDDEN), rtol=1e-5, atol=1e-5)
