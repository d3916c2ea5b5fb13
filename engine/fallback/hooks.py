"""Replaces the attention and cache of transformers' code, by entries in its registries and a cache over our slots.

Importing this file registers two names; they hold no state, so models in one process do not affect each other.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from engine.batch import States
from engine.fallback.config import KeptState

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


def build_cache(config: PreTrainedConfig, num_before: int = 0) -> Any:
    """An empty cache of sequences with so many tokens before. config: of the model's text part.

    Keys and values pass through: pages have the earlier ones.
    """
    cache: Any = DynamicCache(config=config)
    attention: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    for layer in attention:
        layer.update = lambda keys, values, *_, **__: (keys, values)
        layer.get_seq_length = lambda: num_before
        layer.get_mask_sizes = lambda query_length: (query_length, 0)
    return cache


def find_cache_name(model: torch.nn.Module) -> str:
    """The cache's name among the forward's parameters; past_key_values in older transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def keeps_states(config: PreTrainedConfig) -> bool:
    """Whether some layers do. config: as above."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def read_kept(cache: Any, dtype: torch.dtype) -> tuple[KeptState, ...]:
    """The states that a forward of a model of this dtype left in an empty cache."""
    found = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for is_conv, states in ((True, layer.conv_states), (False, layer.recurrent_states)):
                for number, state in states.items():
                    if state is not None:
                        found.append(KeptState(index, number, is_conv, tuple(state.shape[1:]), state.dtype != dtype))
    return tuple(found)


def load_states(cache: Any, kept: tuple[KeptState, ...], states: States, dtype: torch.dtype) -> None:
    """Fill an empty cache with the states that the sequences have, at least one token each."""
    for state, stored in zip(kept, _views(kept, states), strict=True):
        values = stored.index_select(0, states.sources).to(torch.float32 if state.is_wide else dtype)
        layer, number = cache.layers[state.layer], state.number
        if state.is_conv:
            layer.lazy_initialization(conv_states=values, state_idx=number)
            layer.conv_states[number].copy_(values)
        else:
            layer.lazy_initialization(recurrent_states=values, state_idx=number)
            layer.recurrent_states[number].copy_(values)
        layer.has_previous_state[number] = True


def store_states(cache: Any, kept: tuple[KeptState, ...], states: States) -> None:
    """Keep what a forward left."""
    for state, stored in zip(kept, _views(kept, states), strict=True):
        layer = cache.layers[state.layer]
        values = (layer.conv_states if state.is_conv else layer.recurrent_states)[state.number]
        stored.index_copy_(0, states.targets, values.float())


def _views(kept: tuple[KeptState, ...], states: States) -> list[Tensor]:
    """[num_slots, *sizes] of each state."""
    parts, seen = list(dict.fromkeys(state.sizes for state in kept)), Counter[tuple[int, ...]]()
    views = []
    for state in kept:
        views.append(states.parts[parts.index(state.sizes)][:, 0, seen[state.sizes]])
        seen[state.sizes] += 1
    return views
