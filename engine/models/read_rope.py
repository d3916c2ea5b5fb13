"""config.json |-> the rotary embeddings of a model's layers. Both spellings: transformers 5's and older files'."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.layers.rope_config import ROPE_KINDS, RopeConfig, yarn_attention_factor
from engine.models.families import Family
from engine.models.json_values import Json, collection, flag, integer, number, number_unless_zero, numbers
from engine.models.read_layers import FULL, SLIDING

DEFAULT_THETA = 10000.0
NEEDED = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}  # kind |-> keys
ORIGINAL = "original_max_position_embeddings"


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
        return (_read(config, given, family, trained_context, head_dim),), rope_of
    if isinstance(given.get(FULL), Mapping):  # transformers 5
        both = [collection(given, kind, dict) for kind in (FULL, SLIDING)]
    else:  # older files: scaling is of full layers
        theta = number(config, "rope_local_base_freq", DEFAULT_THETA, above=1)
        both = [given, {"rope_type": "default", "rope_theta": theta}]
    full, sliding = (_read(config, one, family, trained_context, head_dim) for one in both)
    return (full, sliding), [0 if window is None else 1 for window in windows]


def _read(config: Json, given: Mapping[str, Any], family: Family, trained_context: int, head_dim: int) -> RopeConfig:
    """One rope: `given`, with theta and the rotated part perhaps beside it."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in family.longrope_names:
        kind = "longrope"
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
        # transformers changes the frequencies with the longest position of a batch; here a model has one set
        key = "long_factor" if trained_context > original else "short_factor"
        stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return RopeConfig(
            kind, theta, factor, original, rotated_dims=rotated,
            factors=numbers(given, key, (rotated or head_dim) // 2),
            attention_factor=number(given, "attention_factor", stretch),
        )  # fmt: skip
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
