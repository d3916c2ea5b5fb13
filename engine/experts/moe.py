"""A mixture of experts in the place of an MLP: how rows choose experts, and the experts' products.

The order of operations and the dtypes of routing are those of transformers' routers: equal logits give equal bits, but
for the weights that a GPU's kernel computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.experts.routing import Routing
from engine.layer_config import Activation
from engine.ops.base import activate

Product = Callable[[Tensor], Tensor]  # [n, K] |-> [n, N]
Form = tuple[str, Tensor | None, Tensor | None]
PLAIN: Form = ("plain", None, None)


class Experts(Protocol):
    """All experts of a layer. A row's result does not depend on which experts other rows have chosen, or how many."""

    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor, /) -> Tensor:
        """The weighted sum of each row's experts, added in float32 in a fixed order, rounded once.

        rows: [T, H], ids: [T, k] int64, different in each row, weights: [T, k] float32 |-> [T, H] in the rows' dtype.
        """
        ...


class Expert(NamedTuple):
    gated: Product  # [n, H] |-> [n, I]: gate and up, activated
    down: Product  # [n, I] |-> [n, H]


@dataclass(frozen=True, slots=True, eq=False)
class BucketedExperts:
    """See `Experts`; one pair of products for each expert that rows have chosen. For CPUs: waits for the ids.

    Experts are added in ascending order. So a row has the same bits alone and among others wherever its products do:
    those of PackedLinear below `torch_rows`, not always those of torch, whose blocking depends on the number of rows.
    """

    experts: Sequence[Expert]

    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts, order = ids.flatten().sort(stable=True)  # [T k] each: by expert, then by row
        hit, counts = torch.unique_consecutive(experts, return_counts=True)
        sizes = counts.tolist()
        buckets = torch.split(order // ids.shape[1], sizes)  # of rows
        shares = torch.split(weights.flatten()[order, None], sizes)  # [n, 1] each
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for expert, bucket, share in zip(hit.tolist(), buckets, shares, strict=True):
            gated, down = self.experts[expert]
            total.index_add_(0, bucket, down(gated(rows[bucket])) * share)  # a row is at most once in a bucket
        return total.to(rows.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedExperts:
    """See `Experts`; stacked weights: grouped products, on GPUs by kernels of which one reads only chosen experts.

    Shapes depend on the number of rows alone and nothing waits for the GPU, so that steps can be captured as CUDA
    graphs. A row's experts are added in the order of its ids. The GPU paths have yet to run on one.

    On a GPU a row of at most MAX_ROWS has the same bits whatever the others are. In more rows, with weights in few
    bits, and on CPUs, the blocking of its products depends on how many rows share an expert.
    """

    gate_up: Tensor  # [E, 2 I, H], each expert's gate before its up. All plain ones are of one dtype and contiguous,
    down: Tensor  # [E, H, I]
    activation: Activation = "silu"
    gate_up_bias: Tensor | None = None  # [E, 2 I]
    down_bias: Tensor | None = None  # [E, H]
    kernels: Any = None  # the module engine.cuda.gpu_experts, where there is Triton
    forms: tuple[Form, Form] = (PLAIN, PLAIN)  # of gate_up and down, with `kernels`; see weights.formats.Stack

    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.kernels is not None:
            mixed: Tensor = self.kernels.mix_experts(
                rows, ids, weights, self.gate_up, self.down, self.activation, self.gate_up_bias, self.down_bias,
                *self.forms,
            )  # fmt: skip
            return mixed
        experts, order = ids.flatten().sort(stable=True)  # [T k] each: by expert, then by row
        all_experts = torch.arange(len(self.down), device=ids.device)
        ends = torch.searchsorted(experts, all_experts, right=True, out_int32=True)  # [E]: where each group ends
        gate_up = _multiply(rows[order // ids.shape[1]], self.gate_up, self.gate_up_bias, experts, ends)  # [T k, 2 I]
        gate, up = gate_up.chunk(2, dim=-1)
        gated = activate(gate, up, self.activation)  # [T k, I]
        outputs = _multiply(gated, self.down, self.down_bias, experts, ends)  # [T k, H]
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return add_slots(outputs, weights, places, rows.dtype)


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, ends: Tensor) -> Tensor:
    """rows: [S, K], by expert; weight: [E, N, K] |-> [S, N]"""
    product = functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return product if bias is None else product.add_(bias[experts])


def add_slots(outputs: Tensor, weights: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Row t's sum over s of weights[t, s] * outputs[places[t k + s]], in float32; the slow twin of the kernel.

    outputs: [T k, H], weights: [T, k] float32, places: [T k] int64 |-> [T, H] in `dtype`
    """
    by_slot = outputs[places].view(*weights.shape, outputs.shape[1])  # [T, k, H]
    total = torch.zeros(len(weights), outputs.shape[1], dtype=torch.float32, device=outputs.device)
    for slot in range(weights.shape[1]):
        total += by_slot[:, slot] * weights[:, slot, None]
    return total.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts:
    """Takes the place of the MLP in other models: [T, H] |-> [T, H]. A shared expert, if any, computes all rows."""

    gate: Product  # [T, H] |-> logits [T, E], float32 where the family widens the product
    routing: Routing
    experts: Experts
    bias: Tensor | None = None  # see `route`
    expert_scale: Tensor | None = None
    shared: Product | None = None  # [T, H] |-> [T, H]
    shared_gate: Product | None = None  # [T, H] |-> [T, 1], whose sigmoid multiplies what `shared` gives
    kernels: Any = None  # see `GroupedExperts`

    def __call__(self, rows: Tensor) -> Tensor:
        choose = route if self.kernels is None else self.kernels.choose_experts
        ids, weights = choose(self.gate(rows), self.routing, self.bias, self.expert_scale, rows.dtype)
        mixed = self.experts(rows, ids, weights)
        if self.shared is None:
            return mixed
        shared = self.shared(rows)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(rows)) * shared
        return mixed + shared


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, expert_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits: [T, E] |-> ids [T, k] int64, by falling score, and weights [T, k] float32. Never waits for a GPU.

    bias: [E] added to scores for the choice only; expert_scale: [E] multiplies the chosen experts' weights (Gemma 4);
    dtype: what precision "rounded" rounds to, by default the logits' dtype.
    """
    wide = logits if routing.precision == "logits" else logits.float()
    scores = _score(wide, routing) if routing.scores_all else wide  # [T, E]
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        choice = _keep_best_groups(choice, routing)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if not routing.scores_all:
        weights = _score(weights, routing)
    if routing.renormalise:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + routing.epsilon if routing.epsilon else total)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    if routing.precision == "rounded":
        weights = weights.to(dtype or logits.dtype)
    return ids, weights.float()


def _score(logits: Tensor, routing: Routing) -> Tensor:
    return logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(dim=-1)


def _keep_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """[T, E] |-> [T, E] with -inf for experts outside the best groups."""
    group_size = routing.num_experts // routing.num_groups
    groups = choice.view(-1, routing.num_groups, group_size)  # [T, groups, E / groups]
    peaks = groups.topk(routing.group_peaks, dim=-1).values.sum(dim=-1)  # [T, groups]
    best = peaks.topk(routing.top_groups, dim=-1).indices
    is_kept = torch.zeros_like(peaks, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_kept[:, :, None], float("-inf")).flatten(1)
