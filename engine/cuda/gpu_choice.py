"""How rows choose experts on a GPU, in one kernel. Twin: experts/moe.py: route.

Needs Triton: import it where a CUDA device is chosen. Nothing here has run on a GPU yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.experts.routing import Routing

WIDTHS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def can_choose(routing: Routing) -> bool:
    """Whether `choose_experts` can: groups are powers of two."""
    sizes = (routing.num_experts, routing.num_groups) if routing.num_groups > 1 else ()
    return all(size & (size - 1) == 0 for size in sizes)


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, expert_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`experts.moe.route` in one launch; of equal scores the first expert is taken. bias, expert_scale: float32."""
    (num_rows, num_experts), top_k = logits.shape, routing.top_k
    ids = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    rounded = {"logits": logits.dtype, "rounded": dtype or logits.dtype}.get(routing.precision, torch.float32)
    choose_kernel[(num_rows,)](
        logits.contiguous(), bias, expert_scale, ids, weights, num_experts, routing.epsilon, routing.scale,
        top_k, triton.next_power_of_2(top_k), routing.num_groups, routing.top_groups, routing.group_peaks,
        routing.scoring == "sigmoid", routing.scores_all, routing.renormalise, routing.precision == "logits",
        WIDTHS[rounded], triton.next_power_of_2(num_experts),
    )  # fmt: skip
    return ids, weights


@triton.jit
def choose_kernel(
    logits, bias, expert_scale, ids, weights, num_experts, epsilon, factor,
    TOP_K: tl.constexpr, KEPT: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PEAKS: tl.constexpr,
    IS_SIGMOID: tl.constexpr, SCORES_ALL: tl.constexpr, RENORMALISE: tl.constexpr, ROUNDS_ALL: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t: the experts of row t. See `choose_experts`. ROUNDED: of the weights, with ROUNDS_ALL of each step."""
    row = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    is_expert = experts < num_experts
    values = tl.load(logits + row * num_experts + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    scores = values
    if SCORES_ALL:
        scores = narrow(score(values, IS_SIGMOID), ROUNDED, ROUNDS_ALL)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + experts, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, float("-inf"))
    if GROUPS > 1:  # BLOCK is the number of experts
        choice = keep_best_groups(choice, GROUPS, TOP_GROUPS, PEAKS, BLOCK)
    places = tl.arange(0, KEPT)
    is_place = places < TOP_K
    chosen = tl.full((KEPT,), float("-inf"), tl.float32)
    mine = tl.zeros((KEPT,), tl.int64)
    for place in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(choice, 0, tie_break_left=True), num_experts - 1)  # NaN chooses an expert, too
        mine = tl.where(places == place, best.to(tl.int64), mine)
        chosen = tl.where(places == place, tl.sum(tl.where(experts == best, scores, 0.0)), chosen)
        choice = tl.where(experts == best, float("-inf"), choice)
    if not SCORES_ALL:
        chosen = narrow(score(chosen, IS_SIGMOID), ROUNDED, ROUNDS_ALL)
    if RENORMALISE:
        total = narrow(tl.sum(tl.where(is_place, chosen, 0.0)), ROUNDED, ROUNDS_ALL)
        chosen = narrow(tl.div_rn(chosen, narrow(total + epsilon, ROUNDED, ROUNDS_ALL)), ROUNDED, ROUNDS_ALL)
    chosen = narrow(chosen * factor, ROUNDED, ROUNDS_ALL)
    if expert_scale is not None:
        chosen *= tl.load(expert_scale + mine)
    tl.store(ids + row * TOP_K + places, mine, mask=is_place)
    tl.store(weights + row * TOP_K + places, narrow(chosen, ROUNDED, True), mask=is_place)


@triton.jit
def score(values, IS_SIGMOID: tl.constexpr):
    """Scores of experts from their float32 logits, -inf where there is no expert."""
    if IS_SIGMOID:
        return 1.0 / (1.0 + tl.exp(-values))
    powers = tl.exp(values - tl.max(values, 0))
    return powers / tl.sum(powers, 0)


@triton.jit
def narrow(values, ROUNDED: tl.constexpr, ROUNDS: tl.constexpr):
    """Rounded to a dtype, if ROUNDS."""
    if ROUNDS:
        values = values.to(ROUNDED).to(tl.float32)
    return values


@triton.jit
def keep_best_groups(
    choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PEAKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[E] |-> [E] with -inf for experts outside the best groups."""
    grouped = tl.reshape(choice, (GROUPS, BLOCK // GROUPS))
    members = tl.arange(0, BLOCK // GROUPS)[None, :]
    sums = tl.zeros((GROUPS,), tl.float32)
    left = grouped
    for _ in tl.static_range(PEAKS):
        best = tl.argmax(left, 1, tie_break_left=True)
        sums += tl.max(left, 1)
        left = tl.where(members == best[:, None], float("-inf"), left)
    groups = tl.arange(0, GROUPS)
    is_kept = groups < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(sums, 0, tie_break_left=True)
        is_kept = is_kept | (groups == best)
        sums = tl.where(groups == best, float("-inf"), sums)
    return tl.reshape(tl.where(is_kept[:, None], grouped, float("-inf")), (BLOCK,))
