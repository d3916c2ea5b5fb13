"""A mixture of experts in the place of an MLP, and experts as separate products, bucket by bucket.

Knows which row goes to which expert, not how weights lie in memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.layers.moe_config import Routing
from engine.layers.routing import route

Product = Callable[[Tensor], Tensor]  # [n, K] |-> [n, N]


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


class BucketedExperts:
    """See `Experts`; one pair of products for each expert that rows have chosen. For CPUs: waits for the ids.

    Experts are added in ascending order. So a row has the same bits alone and among others wherever its products do:
    those of PackedLinear below `torch_rows`, not always those of torch, whose blocking depends on the number of rows.
    """

    __slots__ = ("_experts",)

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._experts = tuple(experts)

    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts, order = ids.flatten().sort(stable=True)  # [T k] each: by expert, then by row
        hit, counts = torch.unique_consecutive(experts, return_counts=True)
        sizes = counts.tolist()
        buckets = torch.split(order // ids.shape[1], sizes)  # of rows
        shares = torch.split(weights.flatten()[order, None], sizes)  # [n, 1] each
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for expert, bucket, share in zip(hit.tolist(), buckets, shares, strict=True):
            gated, down = self._experts[expert]
            total.index_add_(0, bucket, down(gated(rows[bucket])) * share)  # a row is at most once in a bucket
        return total.to(rows.dtype)


class MixtureOfExperts:
    """What an MLP is in other models: [T, H] |-> [T, H]. A shared expert, if any, computes all rows."""

    __slots__ = ("_bias", "_expert_scale", "_experts", "_gate", "_routing", "_shared", "_shared_gate")

    def __init__(
        self, gate: Product, routing: Routing, experts: Experts, *,
        bias: Tensor | None = None, expert_scale: Tensor | None = None,
        shared: Product | None = None, shared_gate: Product | None = None,
    ) -> None:  # fmt: skip
        """gate: [T, H] |-> logits [T, E], float32 where the family widens the product; bias, expert_scale: see `route`;
        shared: [T, H] |-> [T, H]; shared_gate: [T, H] |-> [T, 1], whose sigmoid multiplies the shared expert's output.
        """
        self._gate = gate
        self._routing = routing
        self._experts = experts
        self._bias = bias
        self._expert_scale = expert_scale
        self._shared = shared
        self._shared_gate = shared_gate

    def __call__(self, rows: Tensor) -> Tensor:
        ids, weights = route(self._gate(rows), self._routing, self._bias, self._expert_scale, rows.dtype)
        if self._routing.weighs_input:  # one expert per row
            mixed = self._experts(rows * weights.to(rows.dtype), ids, torch.ones_like(weights))
        else:
            mixed = self._experts(rows, ids, weights)
        if self._shared is None:
            return mixed
        shared = self._shared(rows)
        if self._shared_gate is not None:
            shared = torch.sigmoid(self._shared_gate(rows)) * shared
        return mixed + shared
