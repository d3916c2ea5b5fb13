"""config.json |-> what differs from layer to layer beside windows, ropes and experts.

That is heads and shared keys and values (Gemma 4), and what stands in the place of attention (Qwen3.5, LFM2).
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.layers.recurrent_config import DeltaNetConfig, GatedConvConfig, Recurrent
from engine.models.config import LayerConfig
from engine.models.families import Family
from engine.models.json_values import Json, collection, flag, integer

FULL, SLIDING, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"  # in layer_types
HEAD_KEYS = ("num_key_value_heads", "head_dim")
WIDE_HEAD_DIM = 512  # of full layers, where no file says it


def read_kinds(config: Json, default: list[str], other: str) -> list[str]:
    """Each layer's type, full_attention or `other`: layer_types, or by default what other keys say."""
    kinds = collection(config, "layer_types", list) or default
    if unknown := [kind for kind in kinds if kind not in (FULL, other)]:
        raise ValueError(f"layer_types {unknown} not supported; supported: {FULL}, {other}")
    if len(kinds) != len(default):
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers {len(default)}")
    return kinds


def read_recurrent(config: Json, family: Family, num_layers: int) -> tuple[Recurrent | None, list[bool]]:
    """What stands in the place of attention, and whether each layer has attention. ValueError like `load_config`."""
    layers = range(num_layers)
    if family.mixer == "attention":
        return None, [True for _ in layers]
    if family.mixer == "delta_net":
        every = integer(config, "full_attention_interval")
        kinds = read_kinds(config, [LINEAR if (layer + 1) % every else FULL for layer in layers], LINEAR)
    else:
        indices = collection(config, "full_attn_idxs", list) or list(layers)
        kinds = read_kinds(config, [FULL if layer in indices else CONV for layer in layers], CONV)
    if FULL not in kinds:
        raise ValueError(f"layer_types without {FULL} is not supported; supported: at least one such layer")
    has_attention = [kind == FULL for kind in kinds]
    if all(has_attention):
        return None, has_attention
    return (_read_delta_net(config) if family.mixer == "delta_net" else _read_gated_conv(config)), has_attention


def _read_delta_net(config: Json) -> DeltaNetConfig:
    num_key_heads, num_value_heads = integer(config, "linear_num_key_heads"), integer(config, "linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise ValueError(
            f"linear_num_key_heads {num_key_heads} does not divide linear_num_value_heads {num_value_heads}"
        )
    return DeltaNetConfig(
        num_key_heads,
        num_value_heads,
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        kernel=integer(config, "linear_conv_kernel_dim", least=2),
    )


def _read_gated_conv(config: Json) -> GatedConvConfig:
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(f"num_attention_heads {num_heads} does not divide hidden_size {hidden_size}")
    kernel = integer(config, "conv_L_cache", least=2)
    return GatedConvConfig(num_heads, hidden_size // num_heads, kernel, flag(config, "conv_bias"))


def vary_layers(config: Json, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Gemma 4's layers. ValueError like `load_config`.

    The last num_kv_shared_layers read the keys and values of the last layer of their kind before them, and may have
    MLPs of twice the size.
    """
    num_own = len(layers) - integer(config, "num_kv_shared_layers", 0, least=0)
    inner_size = integer(config, "intermediate_size") * (2 if flag(config, "use_double_wide_mlp") else 1)
    has_values = not flag(config, "attention_k_eq_v")
    heads = [(layer.window, *own) for layer, own in zip(layers, _read_heads(config, layers), strict=True)]
    varied = []
    for index, (layer, (window, num_kv_heads, head_dim)) in enumerate(zip(layers, heads, strict=True)):
        own = replace(layer, num_kv_heads=num_kv_heads, head_dim=head_dim, has_values=has_values or window is not None)
        if index >= num_own:
            sources = [source for source in range(max(num_own, 0)) if heads[source] == heads[index]]
            if not sources:
                raise ValueError(
                    f"num_kv_shared_layers leaves no layer whose keys and values fit those of layer {index}"
                )
            own = replace(own, intermediate_size=inner_size, kv_layer=sources[-1])
        varied.append(own)
    return tuple(varied)


def _read_heads(config: Json, layers: Sequence[LayerConfig]) -> list[tuple[int | None, int | None]]:
    """Each layer's number of KV heads and head_dim. Both spellings: transformers 5's and older files'."""
    if "per_layer_config" in config:
        given = collection(config, "per_layer_config", dict)
        own = [collection(given, str(index), dict) for index in range(len(layers))]
        if unknown := {key for one in own for key in one} - {*HEAD_KEYS}:
            raise ValueError(f"per_layer_config with {', '.join(unknown)} is not supported; supported: {HEAD_KEYS}")
    else:
        full = {"head_dim": integer(config, "global_head_dim", WIDE_HEAD_DIM)}
        if flag(config, "attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = integer(config, "num_global_key_value_heads")
        own = [full if layer.window is None else {} for layer in layers]
    found = []
    num_heads = integer(config, "num_attention_heads")
    for one in own:
        num_kv_heads, head_dim = (integer(one, key) if key in one else None for key in HEAD_KEYS)
        if num_heads % (num_kv_heads or 1) or (head_dim or 2) % 2:
            raise ValueError(f"layers with {one} are not supported: {num_heads} heads are to be divided, head_dim even")
        found.append((num_kv_heads, head_dim))
    return found
