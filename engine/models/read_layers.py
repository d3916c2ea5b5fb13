"""config.json |-> what layers have: windows and ropes.

Ropes have two spellings: transformers 5's and older files'.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.json_values import Json, collection, flag, integer, number, number_unless_zero, numbers
from engine.layer_config import ROPE_KINDS, RopeConfig, yarn_attention_factor
from engine.models.families import Family

FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types
DEFAULT_MAX_WINDOW_LAYERS = 28  # the default of Qwen's `max_window_layers`
DEFAULT_THETA = 10000.0
NEEDED = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}  # kind |-> keys
ORIGINAL = "original_max_position_embeddings"


def read_kinds(config: Json, default: list[str], other: str) -> list[str]:
    """Each layer's type, full_attention or `other`: layer_types, or by default what other keys say."""
    kinds = collection(config, "layer_types", list) or default
    if unknown := [kind for kind in kinds if kind not in (FULL, other)]:
        raise ValueError(f"layer_types {unknown} not supported; supported: {FULL}, {other}")
    if len(kinds) != len(default):
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers {len(default)}")
    return kinds


def read_windows(config: Json, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window in tokens; None: it sees all."""
    how = family.windows
    is_on = how in ("all", "by_type") or (how != "none" and flag(config, "use_sliding_window"))
    window = integer(config, "sliding_window") if is_on and config.get("sliding_window") is not None else None
    if how in ("none", "all", "switched"):
        return (window,) * num_layers
    if how == "by_layer":
        first = integer(config, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
        default = [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]
    else:
        every = integer(config, "sliding_window_pattern", family.full_every or 1)
        default = [FULL if window is None or (layer + 1) % every == 0 else SLIDING for layer in range(num_layers)]
    kinds = read_kinds(config, default, SLIDING)
    if family.is_last_full:
        kinds = [*kinds[:-1], FULL]
    if SLIDING in kinds and window is None:
        raise ValueError(f"layer_types asks for {SLIDING}, but use_sliding_window and sliding_window do not")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_ropes(
    config: Json, family: Family, windows: Sequence[int | None], trained_context: int, head_dim: int
) -> tuple[tuple[RopeConfig, ...], list[int | None]]:
    """The distinct ropes, and the index of each layer's; None: its queries and keys are not rotated."""
    given = collection(config, "rope_scaling", dict) or collection(config, "rope_parameters", dict)
    rope_of: list[int | None] = [0] * len(windows)
    if family.rope_layers:
        step = integer(config, "no_rope_layer_interval")
        default = [int((layer + 1) % step != 0) for layer in range(len(windows))]
        has_rope = collection(config, "no_rope_layers", list) or default  # 1: the layer has one
        if len(has_rope) != len(windows):
            raise ValueError(f"no_rope_layers has {len(has_rope)} entries for num_hidden_layers {len(windows)}")
        rope_of = [0 if one else None for one in has_rope]
    if not family.ropes_by_type:
        return (_read_rope(config, given, family, trained_context, head_dim),), rope_of
    if isinstance(given.get(FULL), Mapping):  # transformers 5
        both = [collection(given, kind, dict) for kind in (FULL, SLIDING)]
    else:  # older files: scaling is of full layers
        theta = number(config, "rope_local_base_freq", DEFAULT_THETA, above=1)
        both = [given, {"rope_type": "default", "rope_theta": theta}]
    full, sliding = (_read_rope(config, one, family, trained_context, head_dim) for one in both)
    return (full, sliding), [0 if window is None else 1 for window in windows]


def _read_rope(
    config: Json, given: Mapping[str, Any], family: Family, trained_context: int, head_dim: int
) -> RopeConfig:
    """One rope: `given`, with theta and the rotated part perhaps beside it."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in family.longrope_names:
        kind = "longrope"
    if kind == "mrope":  # Qwen2.5-VL's older files
        kind = "default"
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"rope_parameters per layer type ({', '.join(given)}) are not supported; supported: one rope")
    part = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    theta = number(given if "rope_theta" in given else config, "rope_theta", DEFAULT_THETA, above=1)
    if kind == "proportional":
        share = number({"partial_rotary_factor": 1.0 if part is None else part}, "partial_rotary_factor")
        if share > 1:
            raise ValueError(f"partial_rotary_factor {share} is not supported; supported: up to 1")
        return RopeConfig(kind, theta, number(given, "factor", 1.0), turned_share=share)
    rotated = 0
    if family.has_partial_rope and part is not None:
        rotated = int(head_dim * number({"partial_rotary_factor": part}, "partial_rotary_factor"))
        if not 0 < rotated <= head_dim or rotated % 2:
            raise ValueError(f"partial_rotary_factor {part} of head_dim {head_dim} is not an even number of dimensions")
    elif part not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {part} is not supported; supported: 1.0")
    rotated = 0 if rotated == head_dim else rotated
    if kind == "default":
        return RopeConfig(kind, theta, rotated_dims=rotated)
    for key in NEEDED.get(kind, []):
        if given.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs a `{key}`")
    if kind == "linear":
        return RopeConfig(kind, theta, number(given, "factor"), rotated_dims=rotated)
    original = integer(config if ORIGINAL in config else given, ORIGINAL, trained_context)
    factor = number(given, "factor", trained_context / original)
    if kind == "longrope":
        stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        long, short = (numbers(given, key, (rotated or head_dim) // 2) for key in ("long_factor", "short_factor"))
        return RopeConfig(
            kind, theta, factor, original, rotated_dims=rotated, factors=long, short_factors=short,
            attention_factor=number(given, "attention_factor", stretch),
        ).within(trained_context)  # fmt: skip
    if kind == "llama3":
        low, high = number(given, "low_freq_factor"), number(given, "high_freq_factor")
        return RopeConfig(kind, theta, factor, original, low, high, rotated_dims=rotated)
    mscales = number_unless_zero(given, "mscale", 0.0), number_unless_zero(given, "mscale_all_dim", 0.0)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=number_unless_zero(given, "beta_fast", 32.0),
        beta_slow=number_unless_zero(given, "beta_slow", 1.0),
        truncate=flag(given, "truncate", True),
        attention_factor=number(given, "attention_factor", yarn_attention_factor(factor, *mscales)),
        rotated_dims=rotated,
    )
