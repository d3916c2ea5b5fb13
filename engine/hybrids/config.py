"""Layers with a state in the place of attention, as data: read from config.json, and their weights' names.

Imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.json_values import Json, collection, flag, integer
from engine.models.config import ConfigPart, ModelConfig
from engine.models.read_layers import FULL, read_kinds
from engine.models.table import LayerTable
from engine.weights.table import Axis, Part, packed, undivided
from wire.kv_layout import StatePart

LINEAR, CONV = "linear_attention", "conv"  # in layer_types


@dataclass(frozen=True, slots=True)
class DeltaNetConfig(ConfigPart):
    """Gated DeltaNet (Qwen3.5): a convolution over queries, keys and values, then a memory of each value head."""

    num_key_heads: int  # Hk, of queries too
    num_value_heads: int  # Hv, a multiple of Hk
    key_dim: int  # Kd
    value_dim: int  # Vd
    kernel: int  # K, positions that a convolution sees

    @property
    def divisible(self) -> dict[str, int]:
        """Value heads go with their key heads."""
        return {"linear_num_key_heads": self.num_key_heads}

    def divide(self, size: int) -> "DeltaNetConfig":
        num_key_heads, num_value_heads = self.num_key_heads // size, self.num_value_heads // size
        return replace(self, num_key_heads=num_key_heads, num_value_heads=num_value_heads)

    def state_parts(self, num_layers: int) -> tuple[StatePart, ...]:
        """In the order of recurrent.DeltaStates. float32."""
        keys = StatePart(num_layers, self.num_key_heads, (self.key_dim, self.kernel - 1))
        values = StatePart(num_layers, self.num_value_heads, (self.value_dim, self.kernel - 1))
        memory = StatePart(num_layers, self.num_value_heads, (self.key_dim, self.value_dim))
        return keys, keys, values, memory

    def add_weights(self, layer: LayerTable) -> None:
        name = "linear_attn."
        keys, values = Axis(self.num_key_heads, self.key_dim), Axis(self.num_value_heads, self.value_dim)
        heads, channels = Axis(self.num_value_heads), [keys, keys, values]
        others = {"in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        rows = [layer.module(name + other, axis) for other, axis in others.items()]
        layer.add("qkv_proj", layer.hidden, *packed(f"{layer.prefix}{name}in_proj_qkv", channels), *rows)
        add_convolution(layer, self.kernel, *packed(f"{layer.prefix}{name}conv1d", channels))
        layer.add("o_proj", values, layer.module(f"{name}out_proj", layer.hidden))
        layer.add_vector("log_decay", f"{name}A_log", heads)
        layer.add_vector("dt_bias", f"{name}dt_bias", heads)
        layer.add_norm("state_norm", f"{name}norm", undivided(self.value_dim))


@dataclass(frozen=True, slots=True)
class GatedConvConfig(ConfigPart):
    """A short convolution between two gates (LFM2). Its channels are divided like the heads of attention."""

    num_heads: int  # N
    head_dim: int  # channels of a head: H / N
    kernel: int  # K, positions that the convolution sees
    has_bias: bool

    def divide(self, size: int) -> "GatedConvConfig":
        return replace(self, num_heads=self.num_heads // size)

    def state_parts(self, num_layers: int) -> tuple[StatePart, ...]:
        return (StatePart(num_layers, self.num_heads, (self.head_dim, self.kernel - 1)),)

    def add_weights(self, layer: LayerTable) -> None:
        name = "conv."
        channels, has_bias = Axis(self.num_heads, self.head_dim), self.has_bias
        layer.add("qkv_proj", layer.hidden, *packed(f"{layer.prefix}{name}in_proj", [channels] * 3, has_bias))
        add_convolution(layer, self.kernel, layer.module(f"{name}conv", channels))
        layer.add("o_proj", channels, layer.module(f"{name}out_proj", layer.hidden, has_bias))
        if has_bias:
            layer.add_vector("conv_bias", f"{name}conv.bias", channels)


def add_convolution(layer: LayerTable, kernel: int, *parts: Part) -> None:
    layer.add("conv", undivided(kernel), *(replace(part, is_conv=True) for part in parts))


def add_delta_net(config: Json, model: ModelConfig) -> ModelConfig:
    """Qwen3.5"""
    every = integer(config, "full_attention_interval")
    default = [LINEAR if (layer + 1) % every else FULL for layer in range(model.num_layers)]
    return _add(config, model, _read_delta_net, read_kinds(config, default, LINEAR))


def add_gated_conv(config: Json, model: ModelConfig) -> ModelConfig:
    """LFM2"""
    indices = collection(config, "full_attn_idxs", list) or list(range(model.num_layers))
    default = [FULL if layer in indices else CONV for layer in range(model.num_layers)]
    return _add(config, model, _read_gated_conv, read_kinds(config, default, CONV))


def _add(
    config: Json, model: ModelConfig, read: Callable[[Json], ConfigPart], kinds: Sequence[str]
) -> ModelConfig:  # fmt: skip
    if FULL not in kinds:
        raise ValueError(f"layer_types without {FULL} is not supported; supported: at least one such layer")
    layers = [replace(layer, has_attention=kind == FULL) for layer, kind in zip(model.layers, kinds, strict=True)]
    return replace(model, layers=tuple(layers), recurrent=None if {*kinds} == {FULL} else read(config))


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
