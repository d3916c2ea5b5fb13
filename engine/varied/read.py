"""config.json |-> layers that differ in heads, share keys and values, and are given inputs of their own (Gemma 4).

Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.json_values import Json, collection, flag, integer
from engine.models.config import ConfigPart, LayerConfig, ModelConfig
from engine.models.table import LayerTable, Table
from engine.weights.table import Axis, Product, Vector, module, undivided

HEAD_KEYS = ("num_key_value_heads", "head_dim")
WIDE_HEAD_DIM = 512  # of full layers, where no file says it


def add_varied_layers(config: Json, model: ModelConfig) -> ModelConfig:
    """Gemma 4's layers, which differ in heads and MLPs.

    The last num_kv_shared_layers read the keys and values of the last layer of their kind before them, and may have
    MLPs of twice the size.
    """
    layers = model.layers
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
    return replace(model, layers=tuple(varied))


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


@dataclass(frozen=True, slots=True)
class TokenInputSize(ConfigPart):
    """See token_inputs.py."""

    size: int  # P

    def complete(self, model: ModelConfig, table: Table) -> Table:
        of_all, words, prefix = undivided(model.num_layers * self.size), Axis(model.vocab_size), model.prefix
        embedding, projection = f"{prefix}embed_tokens_per_layer", f"{prefix}per_layer_model_projection"
        products = {
            "token_embedding": Product((module(embedding, words),), of_all),
            "token_projection": Product((module(projection, of_all),), undivided(model.hidden_size)),
        }
        vectors = {"token_norm": Vector(f"{prefix}per_layer_projection_norm.weight", undivided(self.size))}
        return replace(table, products={**table.products, **products}, vectors={**table.vectors, **vectors})

    def add_weights(self, layer: LayerTable) -> None:
        own = undivided(self.size)
        layer.add("input_gate", layer.hidden, layer.module("per_layer_input_gate", own))
        layer.add("input_projection", own, layer.module("per_layer_projection", layer.hidden))
        layer.add_norm("after_input", "post_per_layer_input_norm")


def read_token_inputs(config: Json) -> TokenInputSize | None:
    size, words = integer(config, "hidden_size_per_layer_input", least=0), integer(config, "vocab_size")
    if size and (own := integer(config, "vocab_size_per_layer_input", 262_144)) != words:
        raise ValueError(f"vocab_size_per_layer_input {own} is not supported; supported: vocab_size, {words}")
    return TokenInputSize(size) if size else None
