"""config.json |-> a mixture of experts, by its keys in a family. Imports no torch."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from engine.experts.config import Moe
from engine.experts.routing import Routing
from engine.json_values import Json, collection, flag, integer
from engine.models.config import ModelConfig
from engine.models.families import Fields, resolve

MoeLayers = Literal["all", "sparse_step", "after_first"]


@dataclass(frozen=True, slots=True)
class ReadExperts:
    """An `Extend`: the mixtures of experts of a family."""

    moe: Fields  # of Moe, without its routing
    routing: Fields  # of Routing
    layers: MoeLayers = "all"
    enabled: str | None = None  # key; false: the model has none

    def __call__(self, config: Json, model: ModelConfig) -> ModelConfig:
        if self.enabled and not flag(config, self.enabled):
            return model
        moe = Moe(routing=Routing(**resolve(self.routing, config)), **resolve(self.moe, config))
        layers = [replace(layer, is_moe=self._has(config, index)) for index, layer in enumerate(model.layers)]
        return replace(model, layers=tuple(layers), moe=moe)

    def _has(self, config: Json, layer: int) -> bool:
        if self.layers == "sparse_step":
            step = integer(config, "decoder_sparse_step", 1)
            return layer not in collection(config, "mlp_only_layers", list) and (layer + 1) % step == 0
        if kinds := collection(config, "mlp_layer_types", list):
            if len(kinds) <= layer:
                raise ValueError(f"mlp_layer_types has {len(kinds)} entries, fewer than num_hidden_layers")
            return bool(kinds[layer] == "sparse")
        return self.layers == "all" or layer >= integer(config, "first_k_dense_replace", least=0)


def count_experts(config: Json, key: str) -> int:
    """Files and transformers differ in its key."""
    others = [one for one in (key, "num_experts", "num_local_experts", "n_routed_experts") if one in config]
    return integer(config, others[0] if others else key)


def build_experts(
    router: str,
    module: str,
    layout: str,
    count: str,
    routing: Fields,
    inner: str = "moe_intermediate_size",
    top_k: str = "num_experts_per_tok",
    layers: MoeLayers = "all",
    enabled: str | None = None,
    **moe: Any,
) -> ReadExperts:
    """count, inner, top_k, enabled: keys."""
    given = {"router": router, "experts": module, "layout": layout, "inner_size": partial(integer, key=inner)}
    chosen = {"num_experts": partial(count_experts, key=count), "top_k": partial(integer, key=top_k)}
    return ReadExperts(given | moe, {**chosen, **routing}, layers, enabled)
