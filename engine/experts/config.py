"""A mixture of experts as data, and its weights' names in a checkpoint. Imports no torch."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, Self

from engine.experts.routing import Routing
from engine.models.config import ConfigPart, ModelConfig
from engine.models.table import LayerTable
from engine.weights.table import Axis, Part, Product, undivided

ExpertLayout = Literal["per_expert", "alternating", "stacked"]  # in a checkpoint
CODES_A_BYTE = 4  # of weights in few bits, at most


@dataclass(frozen=True, slots=True)
class MoeNorms:
    """Names of the norms where experts and a dense MLP take the same rows, each with norms of its own (Gemma 4)."""

    router: str  # tensor; times H ** -0.5, it is the weight of a norm
    after_mlp: str
    before_experts: str
    after_experts: str


@dataclass(frozen=True, slots=True)
class Moe(ConfigPart):
    """A mixture of experts in the place of MLPs, or beside them. Modules: names below the layer's."""

    routing: Routing
    inner_size: int  # of each expert
    router: str  # module of the product whose outputs are scored
    experts: str
    layout: ExpertLayout
    has_biases: bool = False  # of the router and of all products
    choice_bias: str | None = None  # tensor; None: scores alone decide
    has_wide_router: bool = False  # logits are computed in float32
    shared: str | None = None  # module of an MLP for all rows
    shared_size: int = 0  # its inner size
    shared_gate: str | None = None  # module of a product with one output, whose sigmoid multiplies what the MLP gives
    expert_scale: str | None = None  # tensor; multiplies the weights of the chosen experts
    norms: MoeNorms | None = None  # given: the shared MLP is the layer's own

    @property
    def has_mlp(self) -> bool:
        return self.norms is not None

    @property
    def divisible(self) -> dict[str, int]:
        shared = {"shared experts' intermediate_size": self.shared_size} if self.shared_size else {}
        return {"moe_intermediate_size": self.inner_size, **shared}

    def as_stored(self, names: Collection[str]) -> Self:
        """Files of one family may have each expert by itself, or all of a layer in one tensor (Qwen3.5)."""
        is_stacked = self.layout == "per_expert" and any(name.endswith(f"{self.experts}.down_proj") for name in names)
        return replace(self, layout="stacked") if is_stacked else self

    def check_size(self, model: ModelConfig, num_bytes: int) -> None:
        num_experts = self.routing.num_experts * sum(layer.is_moe for layer in model.layers)
        if num_experts * model.hidden_size > CODES_A_BYTE * num_bytes:
            raise ValueError(
                f"{self.routing.num_experts} experts a layer and hidden_size {model.hidden_size} are more than the "
                f"{num_bytes} bytes of the checkpoint's weights can hold: they do not belong together"
            )

    def add_weights(self, layer: LayerTable) -> None:
        of_all, hidden = undivided(self.routing.num_experts), layer.hidden
        layer.add("router", hidden, layer.module(self.router, of_all, self.has_biases))
        for field, name in (("choice_bias", self.choice_bias), ("expert_scale", self.expert_scale)):
            if name is not None:
                layer.add_vector(field, name, of_all)
        layer.experts = tuple(self._build_expert(layer, index) for index in range(self.routing.num_experts))
        if self.shared:
            layer.add_mlp("shared.", self.shared, self.shared_size or layer.layer.intermediate_size)
        if self.shared_gate:
            layer.add("shared_gate", hidden, layer.module(self.shared_gate, undivided(1)))
        if self.norms:
            layer.add_vector("router_norm", self.norms.router, hidden)
            layer.vectors["before_shared"] = layer.vectors.pop("before_mlp")
            layer.add_norm("after_shared", self.norms.after_mlp)
            layer.add_norm("before_experts", self.norms.before_experts)
            layer.add_norm("after_experts", self.norms.after_experts)

    def _build_expert(self, layer: LayerTable, index: int) -> tuple[Product, Product]:
        hidden, inner, names = layer.hidden, Axis(self.inner_size), layer.config.mlp
        if self.layout == "per_expert":
            own = f"{self.experts}.{index}."
            gate_up = tuple(layer.module(own + one, inner) for one in (names.gate, names.up))
            return Product(gate_up, hidden), Product((layer.module(own + names.down, hidden),), inner)
        takes_turns = self.layout == "alternating"  # gate and up rows; else all gate rows come first

        def stacked(product: str, rows: Axis) -> Part:
            """One tensor of all experts; alternating ones are transposed, with biases."""
            name = f"{layer.prefix}{self.experts}.{product}"
            bias = f"{name}_bias" if takes_turns else None
            return Part(name, rows, bias, index=index, num_stacked=self.routing.num_experts, is_transposed=takes_turns)

        step, second = (2, 1) if takes_turns else (1, inner.size)
        both = replace(stacked("gate_up_proj", inner), num_stored=2 * inner.size, step=step)
        halves = tuple(replace(both, first=first) for first in (0, second))
        return Product(halves, hidden), Product((stacked("down_proj", hidden),), inner)


def moe_of(model: ModelConfig) -> Moe | None:
    """The model's, if it has one."""
    assert model.moe is None or isinstance(model.moe, Moe)
    return model.moe
