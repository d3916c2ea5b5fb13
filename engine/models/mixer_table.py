"""The weights of what mixes the rows of a sequence: attention, or a recurrent layer in its place. See table.py."""

from dataclasses import dataclass, replace

from engine.layers.recurrent_config import DeltaNetConfig, GatedConvConfig
from engine.layers.rope_config import rope_order
from engine.models.config import LayerConfig, ModelConfig
from engine.weights.table import Axis, Part, Product, Vector, module, packed, undivided


@dataclass(frozen=True, slots=True)
class GatedConvTable:
    """See recurrent.GatedConv."""

    weight: Product
    bias: Vector | None


@dataclass(frozen=True, slots=True)
class DeltaNetTable:
    """See recurrent.DeltaNet."""

    conv: Product
    log_decay: Vector
    dt_bias: Vector
    norm: Vector


@dataclass(frozen=True, slots=True)
class MixerTable:
    """See decoder.DecoderLayer."""

    qkv_proj: Product
    q_norm: Vector | None
    k_norm: Vector | None
    sinks: Vector | None
    recurrent: DeltaNetTable | GatedConvTable | None
    o_proj: Product


def build_mixer(config: ModelConfig, layer: LayerConfig, prefix: str) -> MixerTable:
    """prefix: of the layer."""
    if layer.has_attention or config.recurrent is None:
        return _build_attention(config, layer, prefix)
    if isinstance(config.recurrent, DeltaNetConfig):
        return _build_delta_net(config, config.recurrent, f"{prefix}linear_attn.")
    return _build_gated_conv(config, config.recurrent, f"{prefix}conv.")


def _build_attention(config: ModelConfig, layer: LayerConfig, prefix: str) -> MixerTable:
    rope, shape, hidden = config.ropes[layer.rope or 0], config.shape_of(layer), undivided(config.hidden_size)
    dim, module_prefix, has_bias = shape.head_dim, f"{prefix}self_attn.", config.has_qkv_bias
    order = rope_order(rope.rotated_dims, dim, is_interleaved=config.rope_is_interleaved)
    queries, keys = Axis(shape.num_heads, dim, order=order), Axis(shape.num_kv_heads, dim, order=order)
    values, attended = replace(keys, order=()), replace(queries, order=())
    norm_axes = [queries, keys] if config.qk_norm == "width" else [undivided(dim, order)] * 2
    is_own = layer.kv_layer is None

    def norm(name: str, axis: Axis) -> Vector | None:
        return Vector(f"{prefix}{name}.weight", axis) if config.qk_norm != "none" else None

    if config.packs_qkv:
        qkv = packed(f"{module_prefix}qkv_proj", [queries, keys, values], has_bias)
    else:
        axes = {"q_proj": queries, "k_proj": keys, "v_proj": values}
        num_parts = 3 if is_own and layer.has_values else 2 if is_own else 1
        qkv = tuple(module(module_prefix + name, rows, has_bias) for name, rows in [*axes.items()][:num_parts])
    if config.has_output_gate:
        qkv = _add_gates(qkv, dim)
    return MixerTable(
        qkv_proj=Product(qkv, hidden),
        q_norm=norm(config.norms.query, norm_axes[0]),
        k_norm=norm(config.norms.key, norm_axes[1]) if is_own else None,
        sinks=Vector(f"{module_prefix}sinks", Axis(config.num_heads)) if config.has_sinks else None,
        recurrent=None,
        o_proj=Product((module(module_prefix + config.output_module, hidden, config.has_output_bias),), attended),
    )


def _add_gates(qkv: tuple[Part, ...], dim: int) -> tuple[Part, ...]:
    """The first part has each head's queries, then its gates: `dim` rows each. Gates become the last part."""
    queries, *others = qkv
    orders = queries.rows.order or tuple(range(dim)), tuple(range(dim, 2 * dim))
    own, gates = (replace(queries, rows=replace(queries.rows, width=2 * dim, order=order)) for order in orders)
    return (own, *others, gates)


def _build_delta_net(config: ModelConfig, own: DeltaNetConfig, prefix: str) -> MixerTable:
    keys, values = Axis(own.num_key_heads, own.key_dim), Axis(own.num_value_heads, own.value_dim)
    heads, hidden = Axis(own.num_value_heads), undivided(config.hidden_size)
    others = {"in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    rows = [module(prefix + name, axis) for name, axis in others.items()]
    return _mixer(
        Product((*packed(f"{prefix}in_proj_qkv", [keys, keys, values]), *rows), hidden),
        DeltaNetTable(
            conv=_convolution(packed(f"{prefix}conv1d", [keys, keys, values]), own.kernel),
            log_decay=Vector(f"{prefix}A_log", heads),
            dt_bias=Vector(f"{prefix}dt_bias", heads),
            norm=Vector(f"{prefix}norm.weight", undivided(own.value_dim)),
        ),
        Product((module(f"{prefix}out_proj", hidden),), values),
    )


def _build_gated_conv(config: ModelConfig, own: GatedConvConfig, prefix: str) -> MixerTable:
    channels, hidden = Axis(own.num_heads, own.head_dim), undivided(config.hidden_size)
    return _mixer(
        Product(packed(f"{prefix}in_proj", [channels] * 3, own.has_bias), hidden),
        GatedConvTable(
            weight=_convolution((module(f"{prefix}conv", channels),), own.kernel),
            bias=Vector(f"{prefix}conv.bias", channels) if own.has_bias else None,
        ),
        Product((module(f"{prefix}out_proj", hidden, own.has_bias),), channels),
    )


def _mixer(in_proj: Product, recurrent: DeltaNetTable | GatedConvTable, out_proj: Product) -> MixerTable:
    return MixerTable(in_proj, None, None, None, recurrent, out_proj)


def _convolution(parts: tuple[Part, ...], kernel: int) -> Product:
    return Product(tuple(replace(part, is_conv=True) for part in parts), undivided(kernel))
