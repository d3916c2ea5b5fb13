"""A mixture of experts from a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.experts.config import moe_of
from engine.experts.moe import BucketedExperts, Expert, Experts, GroupedExperts, MixtureOfExperts
from engine.experts.ops import ExpertOps
from engine.layer_config import Activation
from engine.layers.linear import Linear, PlainLinear, SummedLinear, WidenedLinear
from engine.models.assemble import LayerBuilder
from engine.ops.base import Ops
from engine.weights.formats import PlainFormat
from engine.weights.reader import ShardReader
from engine.weights.table import Product


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """A product, an MLP or experts, with norms of its own around it."""

    own: Callable[..., Tensor]
    ops: Ops
    eps: float
    before: Tensor  # [K]
    after: Tensor | None = None  # [N]

    def __call__(self, rows: Tensor, *routes: Tensor) -> Tensor:
        """rows: [T, K] |-> [T, N]. Does not modify them."""
        out = self.own(self.ops.norm(rows, self.before, self.eps), *routes)
        return out if self.after is None else self.ops.norm(out, self.after, self.eps)


def build_mixture(builder: LayerBuilder) -> Linear:
    """A layer's experts. All ranks choose the same ones."""
    reader, config, moe, products = (
        builder.format.reader,
        builder.config,
        moe_of(builder.config),
        builder.table.products,
    )
    assert moe is not None
    weight, bias = reader.fuse(products["router"]), reader.bias(products["router"])
    kernels = builder.format.ops.find(ExpertOps).expert_kernels
    router: Linear = WidenedLinear(weight) if moe.has_wide_router else PlainLinear(weight, bias)
    experts = build_experts(builder.format, builder.table.experts, config.activation)
    shared = builder.build_mlp("shared.") if moe.shared else None
    if moe.norms is not None and shared is not None:
        router, experts, shared = _add_norms(builder, router, experts, shared)
    mixture = MixtureOfExperts(
        router,
        moe.routing,
        experts,
        bias=builder.vector("choice_bias", torch.float32),
        expert_scale=builder.vector("expert_scale", torch.float32),
        shared=shared,
        shared_gate=PlainLinear(reader.fuse(products["shared_gate"])) if moe.shared_gate else None,
        kernels=kernels if kernels is not None and kernels.can_choose(moe.routing) else None,
    )
    return mixture if moe.norms else builder.summed(mixture)


def _add_norms(builder: LayerBuilder, router: Linear, experts: Experts, mlp: Linear) -> tuple[Linear, Experts, Linear]:
    """The three with norms around them. Norms after them are of the ranks' sums."""
    ops, eps = builder.format.ops, builder.config.rms_eps
    if builder.ranks.size > 1:
        experts, mlp = SummedLinear(experts, builder.ranks), SummedLinear(mlp, builder.ranks)
    return (
        Normed(router, ops, eps, builder.wide("router_norm") * builder.config.hidden_size**-0.5),
        Normed(experts, ops, eps, builder.norm("before_experts"), builder.norm("after_experts")),
        Normed(mlp, ops, eps, builder.norm("before_shared"), builder.norm("after_shared")),
    )


def build_experts(format: PlainFormat, products: Sequence[tuple[Product, Product]], activation: Activation) -> Experts:
    """products: of each expert, gate and up, then down."""
    reader = format.reader
    if reader.device.type == "cuda":
        ups, downs = zip(*products, strict=True)
        kernels = format.ops.find(ExpertOps).expert_kernels
        stack = partial(PlainFormat.stack, format) if kernels is None else format.stack
        gate_up, down = stack(ups), stack(downs)
        up_bias, down_bias = _stack_biases(reader, ups), _stack_biases(reader, downs)
        forms = gate_up[1:], down[1:]
        return GroupedExperts(gate_up.codes, down.codes, activation, up_bias, down_bias, kernels, forms)
    return BucketedExperts([Expert(format.gated(one, activation), format.linear(down)) for one, down in products])


def _stack_biases(reader: ShardReader, products: Sequence[Product]) -> Tensor | None:
    """[E, N]; None if this rank adds none."""
    biases = [bias for one in products if (bias := reader.bias(one)) is not None]
    return torch.stack(biases) if biases else None
