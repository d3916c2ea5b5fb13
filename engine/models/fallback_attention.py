"""Our entry in transformers' registries of attention: each attention module calls what a model or a probe gave it.

Importing this file registers two names; they hold no state, so models of one process do not meet.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

SERVE, PROBE = "baton", "baton_probe"  # our names for `attn_implementation`; only PROBE gets masks
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Mapping[str, Any]], Tensor]
"""query [B, Hq, T, D], keys [B, Hkv, T, D], values [B, Hkv, T, Dv], mask, options |-> [B, T, Hq, Dv]"""

# Where masks are compared: among these every window, chunk and look ahead below 2**21 tokens hides or shows some pair.
POSITIONS = sorted({max(0, 2**power + by) for power in range(22) for by in (-1, 0, 1)})


def dispatch(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers calls this in each attention module; the module's attribute knows its model and layer."""
    attend: Attend = module.baton_attend  # type: ignore[assignment]
    return attend(query, key, value, attention_mask, options), None


def _sample_mask(*, mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
    """[1, 1, N, N] bool: whether the model lets a query at POSITIONS[i] see POSITIONS[j]."""
    position = torch.tensor(POSITIONS, device="cpu")
    visible = mask_function(0, 0, position[:, None], position)
    return visible.broadcast_to(1, 1, len(POSITIONS), len(POSITIONS))


AttentionInterface.register(SERVE, dispatch)
AttentionInterface.register(PROBE, dispatch)
AttentionMaskInterface.register(PROBE, _sample_mask)
