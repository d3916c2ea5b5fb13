"""`route` against the routers of transformers: the same logits give the same experts and weights."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.layers.config import Routing
from engine.layers.moe import route
from tests.engine.layers.modules import HIDDEN, build, randn

ROWS = 40
of_32 = partial(Routing, 32, 4)


class Family(NamedTuple):
    router: str  # module:class of transformers
    routing: Routing
    bias: Callable[[Any], Tensor | None] = lambda router: None
    takes_bias: bool = False  # as an argument of forward


def own_bias(router: Any) -> Tensor | None:
    bias: Tensor = router.e_score_correction_bias
    return bias


def given_bias(router: Any) -> Tensor:
    return randn(32, seed=5) / 8


noaux_tc = of_32(
    scoring="sigmoid", num_groups=8, top_groups=4, group_peaks=2, renormalise=True, epsilon=1e-20, scale=2.5
)
FAMILIES = {
    "qwen3_moe": Family("qwen3_moe:Qwen3MoeTopKRouter", of_32(renormalise=True, precision="rounded")),
    "gpt_oss": Family("gpt_oss:GptOssTopKRouter", of_32(scores_all=False, precision="rounded")),
    "gemma4": Family("gemma4:Gemma4TextRouter", of_32(renormalise=True)),
    "glm4_moe": Family("glm4_moe:Glm4MoeTopkRouter", noaux_tc, own_bias),
    "lfm2_moe": Family(
        "lfm2_moe:Lfm2MoeTopKRouter",
        of_32(scoring="sigmoid", renormalise=True, epsilon=1e-6, scale=1.5, precision="logits"), given_bias, True,
    ),
}  # fmt: skip


def route_like(family: Family, router: Any, rows: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """What `route` makes of the router's logits, and the router's own ids and weights."""
    bias, scale = family.bias(router), None
    logits, weights, ids = router(rows, bias) if family.takes_bias else router(rows)
    if family.router.startswith("gemma4"):
        logits = router.proj(router.norm(rows) * router.scale * router.scalar_root_size)
        scale = router.per_expert_scale
    return route(logits, family.routing, bias, scale, rows.dtype), ids, weights


@pytest.fixture
def sorted_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some families leave the order of the chosen experts open, and with it the order in which weights are added."""
    topk = torch.topk
    monkeypatch.setattr(torch, "topk", lambda *args, sorted=True, **kwargs: topk(*args, **kwargs))


@torch.no_grad()
@pytest.mark.usefixtures("sorted_topk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_and_weights_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    router, rows = build(family.router, family.routing, dtype), randn(ROWS, HIDDEN, seed=9).to(dtype)
    (ids, weights), expected_ids, expected = route_like(family, router, rows)
    assert ids.dtype is torch.int64 and weights.dtype is torch.float32
    assert torch.equal(ids, expected_ids) and torch.equal(weights, expected.float())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"top_k": 33}, "33 of 32 experts"),
        ({"num_groups": 5}, "5 groups"),
        ({"num_groups": 8, "top_groups": 9}, "9 in 8 groups"),
        ({"num_groups": 16, "group_peaks": 3, "top_groups": 16}, "groups of 2 experts are too small"),
        ({"num_groups": 16, "top_groups": 1}, "groups of 2 experts are too small"),
    ],
)
def test_routings_that_fit_no_model_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Routing(**{"num_experts": 32, "top_k": 4} | settings)
