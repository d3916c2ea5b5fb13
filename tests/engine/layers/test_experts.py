"""Experts in buckets, in groups and by the interpreted kernels against a loop and transformers; a row among others."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import gpu_experts
from engine.layers.config import Activation, Routing
from engine.layers.moe import Experts, MixtureOfExperts
from tests.engine.layers.modules import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    WAYS,
    choose,
    randn,
    random_experts,
)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # e^x in the interpreter, whose inverse is 0
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("num_rows", [1, 4, gpu_experts.MAX_ROWS + 1])
def test_experts_add_up_like_a_loop(num_rows: int, activation: Activation, has_bias: bool, way: str) -> None:
    stacked, rows, chosen = random_experts(activation, has_bias), 2 * randn(num_rows, HIDDEN), choose(num_rows)
    mixed = stacked.make(way)(rows, *chosen)
    assert mixed.dtype is torch.float32
    torch.testing.assert_close(mixed.double(), stacked.loop(rows, *chosen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("hidden", "width"), [(600, 7), (9, 520)])
def test_kernels_with_depths_of_several_tiles(hidden: int, width: int) -> None:
    stacked, rows, chosen = random_experts("silu", True, hidden, width), randn(2, hidden + 3)[:1, :hidden], choose(1)
    mixed = stacked.make("kernels")(rows, *chosen)
    torch.testing.assert_close(mixed.double(), stacked.loop(rows, *chosen), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near(dtype: torch.dtype, way: str) -> None:
    stacked, rows, chosen = random_experts("clamped", True).to(dtype), randn(4, HIDDEN).to(dtype), choose(4)
    mixed, truth = stacked.make(way)(rows, *chosen), stacked.loop(rows, *chosen)
    assert mixed.dtype is dtype
    # Each of three roundings is off by half an eps at most, twice that where the interpreter truncates bfloat16.
    assert (mixed.double() - truth).norm() < torch.finfo(dtype).eps * truth.norm()


@pytest.mark.parametrize("way", ["bucketed", "grouped"])
def test_no_rows_and_all_rows_on_one_expert(way: str) -> None:
    stacked, rows, chosen = random_experts("silu", False), randn(5, HIDDEN), (torch.full((5, 1), 6), torch.ones(5, 1))
    experts = stacked.make(way)
    torch.testing.assert_close(experts(rows, *chosen).double(), stacked.loop(rows, *chosen), rtol=1e-5, atol=1e-5)
    assert experts(rows[:0], *(part[:0] for part in chosen)).shape == (0, HIDDEN)


@pytest.mark.parametrize("way", WAYS)
def test_nan_of_a_chosen_expert_is_not_clamped_away(way: str) -> None:
    experts, chosen = random_experts("clamped", True).make(way), torch.tensor([[0, NUM_EXPERTS - 1], [0, 1]])
    mixed = experts(randn(2, HIDDEN), chosen, torch.ones(2, 2))
    assert mixed[0].isnan().all() and mixed[1].isfinite().all()


def assert_alone_as_among_others(experts: Experts, rows: Tensor) -> None:
    ids, weights = choose(len(rows))
    mixed = experts(rows, ids, weights)
    for row in range(len(rows)):
        own = slice(row, row + 1)
        assert torch.equal(experts(rows[own], ids[own], weights[own]), mixed[own])


def multiply_each(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product of each row by itself."""
    return torch.cat([functional.linear(row[None], weight, bias) for row in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    stacked, rows = random_experts("silu", True).to(dtype), randn(16, HIDDEN).to(dtype)
    assert_alone_as_among_others(stacked.bucketed(multiply_each), rows)
    assert_alone_as_among_others(stacked.make("kernels"), rows[:3])


def test_nothing_reads_values_back_from_the_device() -> None:
    stacked = random_experts("clamped", True)
    experts = stacked.to(torch.bfloat16).to("meta").make("grouped")
    routing = Routing(NUM_EXPERTS, TOP_K, num_groups=4, top_groups=2, renormalise=True)
    mixture = MixtureOfExperts(lambda rows: rows[:, :NUM_EXPERTS], routing, experts)
    assert mixture(torch.empty(40, HIDDEN, dtype=torch.bfloat16, device="meta")).shape == (40, HIDDEN)


def test_shapes_that_the_kernel_would_misread_are_refused() -> None:
    stacked, (ids, weights) = random_experts("silu", False), choose(2)
    for rows, said in ((randn(HIDDEN, 2).T, "expected at most"), (randn(2, HIDDEN + 1), f"rows of {HIDDEN + 1}")):
        with pytest.raises(ValueError, match=said):
            gpu_experts.mix(rows, ids, weights, stacked.gate_up, stacked.down, "silu")
