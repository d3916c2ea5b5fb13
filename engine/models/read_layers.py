"""config.json |-> what differs from layer to layer beside windows, ropes and experts: heads, shared keys and values."""

from collections.abc import Sequence
from dataclasses import replace

from engine.models.config import LayerConfig
from engine.models.json_values import Json, collection, flag, integer

HEAD_KEYS = ("num_key_value_heads", "head_dim")
WIDE_HEAD_DIM = 512  # of full layers, where no file says it


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
