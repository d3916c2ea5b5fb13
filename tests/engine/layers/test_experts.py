"""Experts in buckets, groups and interpreted kernels against a loop, and `route` against transformers' routers."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.cuda import gpu_experts
from engine.experts.moe import BucketedExperts, Expert, Experts, GroupedExperts, MixtureOfExperts, route
from engine.experts.routing import Routing
from engine.formats.fp8 import Fp8Matrix
from engine.formats.groups import round_to_4_bits, round_to_8_bits, with_zeros
from engine.formats.quantised_forms import MXFP4_CODES
from engine.formats.stacks import stack_fp8, stack_groups, widen
from engine.layer_config import Activation
from engine.ops.base import activate
from tests.support.combinations import combination

HIDDEN, WIDTH = 64, 24  # of rows and of experts


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def build(name: str, routing: Routing, dtype: torch.dtype = torch.float32) -> Any:
    """The class model:Class, which reads a config that answers for all models."""
    model, kind = name.split(":")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    built = getattr(module, kind)(
        SimpleNamespace(
            hidden_size=HIDDEN, rms_norm_eps=1e-6, n_routed_experts=routing.num_experts,
            num_experts=routing.num_experts, num_local_experts=routing.num_experts, num_experts_per_tok=routing.top_k,
            top_k_experts=routing.top_k, norm_topk_prob=routing.renormalise, n_group=routing.num_groups,
            topk_group=routing.top_groups, routed_scaling_factor=routing.scale, use_expert_bias=True,
        )
    )  # fmt: skip
    with torch.no_grad():
        for seed, (key, value) in enumerate([*built.named_parameters(), *built.named_buffers()]):
            value.copy_(randn(*value.shape, seed=seed) / 8 + ("scale" in key))
    return built.to(dtype)


NUM_EXPERTS, TOP_K = 8, 3
TILED = gpu_experts.MAX_ROWS + 1  # the fewest rows that take tiles
WAYS = ("bucketed", "grouped", "kernels")  # kernels: interpreted
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass
class Stacked:
    """Weights of all experts, see `GroupedExperts`."""

    activation: Activation
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def to(self, there: torch.dtype | str) -> "Stacked":
        parts: dict[str, Any] = {name: part.to(there) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **parts)

    def make(self, way: str) -> Experts:
        if way == "bucketed":
            return self.bucketed(functional.linear)
        kernels = gpu_experts if way == "kernels" else None
        return GroupedExperts(self.gate_up, self.down, self.activation, self.gate_up_bias, self.down_bias, kernels)

    def bucketed(self, multiply: Multiply) -> BucketedExperts:
        def gated(expert: int, rows: Tensor) -> Tensor:
            bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
            gate, up = multiply(rows, self.gate_up[expert], bias).chunk(2, dim=-1)
            return activate(gate, up, self.activation)

        def down(expert: int, rows: Tensor) -> Tensor:
            return multiply(rows, self.down[expert], None if self.down_bias is None else self.down_bias[expert])

        return BucketedExperts([Expert(partial(gated, i), partial(down, i)) for i in range(len(self.down))])

    def loop(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same in float64, one row and expert after the other."""
        experts = self.to(torch.float64).bucketed(functional.linear).experts
        total = torch.zeros(rows.shape, dtype=torch.float64)
        for row, (own, by) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            for expert, weight in zip(own, by, strict=True):
                gated, down = experts[expert]
                total[row] += weight * down(gated(rows[row : row + 1].double()))[0]
        return total


def random_experts(activation: Activation, has_bias: bool, hidden: int = HIDDEN, width: int = WIDTH) -> Stacked:
    gate_up, down = randn(NUM_EXPERTS, 2 * width, hidden, seed=1) / 4, randn(NUM_EXPERTS, hidden, width, seed=2) / 4
    gate_up[-1] = float("nan")  # `choose` leaves it out
    biases = 3 * randn(NUM_EXPERTS, 2 * width, seed=3), randn(NUM_EXPERTS, hidden, seed=4)
    return Stacked(activation, gate_up, down, *(biases if has_bias else ()))


def choose(num_rows: int) -> tuple[Tensor, Tensor]:
    """[T, k] each: ids, never that of the last expert, and weights."""
    ids = randn(num_rows, NUM_EXPERTS - 1, seed=7).topk(TOP_K).indices
    return ids, randn(num_rows, TOP_K, seed=8).softmax(-1)


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
    """The ids and weights that `route` finds in the router's logits, and the router's own."""
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


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FAMILIES), ("qwen3_moe", torch.float16)]
    + [combination(name, torch.float16) for name in FAMILIES if name != "qwen3_moe"],
    ids=str,
)
def test_the_kernel_chooses_as_its_twin(name: str, dtype: torch.dtype) -> None:
    """Weights are near: e^x is another one."""
    family = FAMILIES[name]
    logits, bias, scale = randn(ROWS, 32, seed=9).to(dtype), randn(32, seed=5) / 8, randn(32, seed=6).exp()
    given = bias if name in ("glm4_moe", "lfm2_moe") else None, scale if name == "gemma4" else None
    (ids, weights), (expected_ids, expected) = (
        choose(logits, family.routing, *given, torch.float16) for choose in (gpu_experts.choose_experts, route)
    )
    differs = (ids != expected_ids).any(-1)  # where scores are equal after rounding
    assert differs.sum() <= (2 if family.routing.precision == "logits" and dtype is torch.float16 else 0)
    torch.testing.assert_close(weights[~differs], expected[~differs], rtol=2e-3, atol=1e-6)


def test_rows_of_nan_choose_experts_that_exist() -> None:
    logits = torch.full((3, 24), float("nan"))
    logits[1, :9], logits[2] = 1.0, float("-inf")
    routing = Routing(24, 4, renormalise=True)
    assert gpu_experts.can_choose(routing) and not gpu_experts.can_choose(Routing(24, 4, num_groups=4, top_groups=2))
    ids, weights = gpu_experts.choose_experts(logits, routing)
    assert ((ids >= 0) & (ids < 24)).all() and weights.shape == (3, 4)


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


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # e^x in the interpreter, whose inverse is 0
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("activation", "has_bias"),
    [("silu", False), combination("silu", True), combination("gelu_tanh", False), ("clamped", True)],
)
@pytest.mark.parametrize("num_rows", [1, gpu_experts.MAX_ROWS + 1, *map(combination, (4, 90))])
def test_experts_add_up_like_a_loop(num_rows: int, activation: Activation, has_bias: bool, way: str) -> None:
    stacked, rows, chosen = random_experts(activation, has_bias), 2 * randn(num_rows, HIDDEN), choose(num_rows)
    mixed = stacked.make(way)(rows, *chosen)
    assert mixed.dtype is torch.float32
    torch.testing.assert_close(mixed.double(), stacked.loop(rows, *chosen), rtol=1e-5, atol=1e-5)


def code(rows: Tensor, form: str) -> list[Any]:
    """One part, [n, K], in few bits."""
    if form.startswith("e4m3"):
        peak = rows.view(len(rows), -1, 128).abs().amax(2) if form == "e4m3 blocks" else rows.abs().amax(1)
        scale = (peak / 448).float()
        each = scale.repeat_interleave(128, 1) if scale.ndim == 2 else scale[:, None]
        return [Fp8Matrix((rows / each).to(torch.float8_e4m3fn), scale)]
    if form == "mxfp4":
        scale = torch.exp2((rows.view(len(rows), -1, 32).abs().amax(2) / 6).log2().ceil() - 1)
        nearest = (rows / scale.repeat_interleave(32, 1))[..., None].sub(MXFP4_CODES[:15] - 12.0).abs().argmin(-1)
        return [with_zeros(MXFP4_CODES[nearest], scale, 12, 8)]
    groups = round_to_8_bits(rows) if form.endswith("8") else round_to_4_bits(rows)
    return (
        [groups._replace(minimum=groups.minimum.add(0.01).half().float())] if form.startswith("minimums") else [groups]
    )


@pytest.mark.parametrize(
    ("form", "num_rows"),
    [
        ("e4m3", TILED), combination("e4m3", 1), combination("e4m3 blocks", TILED), ("e4m3 blocks", 1),
        combination("groups4", TILED), ("groups4", 1), combination("groups8", TILED), ("groups8", 1),
        ("minimums4", TILED), combination("minimums4", 1), combination("minimums8", TILED), ("minimums8", 1),
        combination("mxfp4", TILED), ("mxfp4", 1),
    ],
)  # fmt: skip
def test_experts_in_few_bits_add_up_like_a_loop_of_their_values(form: str, num_rows: int) -> None:
    activation: Activation = "clamped" if form == "mxfp4" else "silu"
    plain, rows, chosen = random_experts(activation, True, 256, 128), 2 * randn(num_rows, 256), choose(num_rows)
    stack = stack_fp8 if form.startswith("e4m3") else stack_groups
    gate_up, down = (
        stack([code(one.nan_to_num(0.5), form) for one in ones], torch.device("cpu"))
        for ones in (plain.gate_up, plain.down)
    )
    assert gate_up.form == down.form == form.partition(" ")[0]
    dense = replace(plain, gate_up=widen(gate_up), down=widen(down))
    experts = GroupedExperts(
        gate_up.codes, down.codes, activation, plain.gate_up_bias, plain.down_bias, gpu_experts,
        (gate_up[1:], down[1:]),
    )  # fmt: skip
    mixed = experts(rows, *chosen)
    torch.testing.assert_close(mixed.double(), dense.loop(rows, *chosen), rtol=1e-5, atol=1e-4)
    wanted = torch.stack([torch.cat([part.dense() for part in code(one.nan_to_num(0.5), form)]) for one in plain.down])
    assert torch.equal(widen(down), wanted), "each value is exact"


@pytest.mark.parametrize(("hidden", "width"), [(40, 7), (9, 35)])
def test_kernels_with_depths_of_several_tiles(hidden: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller tiles, as the interpreter takes seconds for several of 512."""
    for name, tile in (("GATED_TILE", (4, 32)), ("TILE", (8, 32)), ("SUM_TILE", 16)):
        monkeypatch.setattr(gpu_experts, name, tile)
    stacked, rows, chosen = random_experts("silu", True, hidden, width), randn(2, hidden + 3)[:1, :hidden], choose(1)
    mixed = stacked.make("kernels")(rows, *chosen)
    torch.testing.assert_close(mixed.double(), stacked.loop(rows, *chosen), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "counts", [[0, 37, 1, 0, 16, 15, 0, 0], combination([0] * 6 + [69, 0]), combination([17, 0, 0, 0, 0, 0, 0, 16])]
)
def test_experts_of_many_rows_have_tiles_of_their_own(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths and outputs of several tiles, too; slots are compared in several blocks."""
    monkeypatch.setattr(gpu_experts, "SORT_BLOCK", 16)
    monkeypatch.setattr(gpu_experts, "SLOT_TILES", (16, 16))
    stacked = random_experts("silu", True, 150, 70)
    stacked.gate_up[-1] = 0.5
    ids = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))][:, None]
    rows, weights = randn(len(ids), 160)[:, :150], randn(len(ids), 1).abs()
    mixed = stacked.make("kernels")(rows, ids, weights)
    torch.testing.assert_close(mixed.double(), stacked.loop(rows, ids, weights), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_groups_are_sorted_by_a_kernel_where_torch_multiplies_them(
    activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_experts, "is_for_torch", lambda *_: True)
    stacked, rows, chosen = random_experts(activation, False), 2 * randn(ROWS, HIDDEN), choose(ROWS)
    mixed = stacked.make("kernels")(rows, *chosen)
    torch.testing.assert_close(mixed.double(), stacked.loop(rows, *chosen), rtol=1e-5, atol=1e-5)


def test_where_torch_multiplies_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it waits for the sizes of groups, which no captured step can."""
    down, cuda = torch.empty(8, 64, 24, device="meta"), torch.device("cuda")
    rows, half = (SimpleNamespace(dtype=dtype, device=cuda) for dtype in (torch.bfloat16, torch.float16))
    for capability, expected in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        assert gpu_experts.is_for_torch(rows, 512, down) is expected  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    for other, num_slots, sizes in ((half, 512, (64, 24)), (rows, 511, (64, 24)), (rows, 512, (64, 20))):
        assert not gpu_experts.is_for_torch(other, num_slots, torch.empty(8, *sizes, device="meta"))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [(4, torch.bfloat16), combination(4, torch.float16), combination(20, torch.bfloat16), (20, torch.float16)],
    ids=str,
)
def test_half_precision_stays_near(num_rows: int, dtype: torch.dtype, way: str) -> None:
    if way == "kernels" and num_rows > gpu_experts.MAX_ROWS and dtype is torch.bfloat16:
        pytest.skip("the interpreter does not multiply bfloat16")
    stacked = random_experts("clamped", True).to(dtype)
    rows, chosen = randn(num_rows, HIDDEN).to(dtype), choose(num_rows)
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


@pytest.mark.parametrize("dtype", [combination(torch.float32), torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    stacked, rows = random_experts("silu", True).to(dtype), randn(16, HIDDEN).to(dtype)
    assert_alone_as_among_others(stacked.bucketed(multiply_each), rows)
    assert_alone_as_among_others(stacked.make("kernels"), rows[:2])


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
