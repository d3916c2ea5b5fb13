"""The weights of a decoder by the names that assemble.py has for them: what each is called in a checkpoint, and how
ranks divide it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from engine.layer_config import rope_order
from engine.models.config import LayerConfig, ModelConfig
from engine.weights.files import TensorEntry
from engine.weights.table import Axis, Part, Product, Shard, Stored, Vector, Weight, module, packed, undivided
from wire.kv_layout import can_divide, heads_of


@dataclass(frozen=True, slots=True)
class Table:
    """The weights of a model or of one of its layers; those that it lacks are not there."""

    products: Mapping[str, Product]
    vectors: Mapping[str, Vector]
    experts: tuple[tuple[Product, Product], ...] = ()  # of each expert, gate and up, then down
    layers: "tuple[Table, ...]" = ()

    def weights(self) -> Iterator[Weight]:
        yield from chain(self.products.values(), self.vectors.values(), *self.experts)
        for layer in self.layers:
            yield from layer.weights()

    def stored(self) -> Iterator[Stored]:
        """The tensors that a checkpoint has to have. One that several parts share comes several times."""
        for weight in self.weights():
            yield from weight.stored()


def build_table(config: ModelConfig) -> Table:
    """config: of the whole model, or of a draft head."""
    hidden, words, prefix = undivided(config.hidden_size), Axis(config.vocab_size), config.prefix
    products = {
        "embedding": Product((module(f"{prefix}embed_tokens", words),), hidden),
        "lm_head": Product((module(config.head, words),), hidden),
    }
    vectors = {"final_norm": Vector(f"{prefix}{config.norms.final}.weight", hidden)}
    layers = tuple(LayerTable(config, index).build() for index in range(config.num_layers))
    table = Table(products, vectors, layers=layers)
    for part in (config.token_inputs, config.draft_head):
        table = table if part is None else part.complete(config, table)
    return table


class LayerTable:
    """Builds the table of one layer. Names in the checkpoint begin with its prefix."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.config = config
        self.layer: LayerConfig = config.layers[index]
        self.prefix = f"{config.prefix}layers.{index}."
        self.hidden = undivided(config.hidden_size)
        self.products: dict[str, Product] = {}
        self.vectors: dict[str, Vector] = {}
        self.experts: tuple[tuple[Product, Product], ...] = ()

    def build(self) -> Table:
        config, layer, norms = self.config, self.layer, self.config.norms
        moe = config.moe if layer.is_moe else None
        self.add_norm("before_attention", norms.before_attention)
        self.add_norm("after_attention", norms.after_attention)
        self.add_norm("before_mlp", norms.before_mlp)
        self.add_norm("after_mlp", norms.after_mlp)
        own = config.token_kv if layer.has_attention or config.recurrent is None else config.recurrent
        if own is None:
            self.add_attention()
        else:
            own.add_weights(self)
        if moe is not None:
            moe.add_weights(self)
        else:
            self.add_mlp("", config.mlp.module, layer.intermediate_size)
        if config.token_inputs is not None:
            config.token_inputs.add_weights(self)
        if config.has_layer_scale:
            self.add_vector("scale", "layer_scalar", undivided(1))
        return Table(self.products, self.vectors, self.experts)

    def add(self, field: str, inputs: Axis, *parts: Part) -> None:
        self.products[field] = Product(parts, inputs)

    def add_vector(self, field: str, name: str, axis: Axis) -> None:
        self.vectors[field] = Vector(self.prefix + name, axis)

    def add_norm(self, field: str, name: str | None, axis: Axis | None = None) -> None:
        if name is not None:
            self.add_vector(field, f"{name}.weight", axis or self.hidden)

    def module(self, name: str, rows: Axis, has_bias: bool = False) -> Part:
        return module(self.prefix + name, rows, has_bias)

    def add_attention(self) -> None:
        config, layer, shape = self.config, self.layer, self.config.shape_of(self.layer)
        dim, rotated, has_bias = shape.head_dim, config.ropes[layer.rope or 0].rotated_dims, config.has_qkv_bias
        order = rope_order(rotated, dim, is_interleaved=config.rope_is_interleaved)
        queries, keys = Axis(shape.num_heads, dim, order=order), Axis(shape.num_kv_heads, dim, order=order)
        values, attended = replace(keys, order=()), replace(queries, order=())
        is_own = layer.kv_layer is None
        if config.packs_qkv:
            qkv = packed(f"{self.prefix}self_attn.qkv_proj", [queries, keys, values], has_bias)
        else:
            axes = {"q_proj": queries, "k_proj": keys, "v_proj": values}
            num_parts = 3 if is_own and layer.has_values else 2 if is_own else 1
            names = [*axes][:num_parts]
            qkv = tuple(self.module(f"self_attn.{name}", axes[name], has_bias) for name in names)
        if config.has_output_gate:
            qkv = _add_gates(qkv, dim)
        self.add("qkv_proj", self.hidden, *qkv)
        self.add(
            "o_proj",
            attended,
            self.module(f"self_attn.{config.output_module}", self.hidden, config.has_output_bias),
        )
        if config.qk_norm != "none":
            axes = {"query": queries, "key": keys}
            if config.qk_norm == "head":
                axes = dict.fromkeys(axes, undivided(dim, order))
            self.add_norm("q_norm", config.norms.query, axes["query"])
            if is_own:
                self.add_norm("k_norm", config.norms.key, axes["key"])
        if config.has_sinks:
            self.add_vector("sinks", "self_attn.sinks", Axis(config.num_heads))

    def add_mlp(self, field: str, name: str, inner_size: int | None) -> None:
        config, inner = self.config, Axis(inner_size or self.config.intermediate_size)
        names, has_bias = config.mlp, config.has_mlp_bias
        if config.packs_gate_up:
            gate_up = packed(f"{self.prefix}{name}.gate_up_proj", [inner, inner], has_bias)
        else:
            gate_up = tuple(self.module(f"{name}.{one}", inner, has_bias) for one in (names.gate, names.up))
        self.add(f"{field}gate_up_proj", self.hidden, *gate_up)
        self.add(f"{field}down_proj", inner, self.module(f"{name}.{names.down}", self.hidden, has_bias))


def _add_gates(qkv: tuple[Part, ...], dim: int) -> tuple[Part, ...]:
    """The first part has each head's queries, then its gates: `dim` rows each. Gates become the last part."""
    queries, *others = qkv
    orders = queries.rows.order or tuple(range(dim)), tuple(range(dim, 2 * dim))
    own, gates = (replace(queries, rows=replace(queries.rows, width=2 * dim, order=order)) for order in orders)
    return (own, *others, gates)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The model as one rank computes it; its vocabulary stays whole. ValueError names what cannot be divided."""
    size = shard.size
    for name, count in config.divisible.items():
        if count % size:
            raise ValueError(f"{size} ranks do not divide {name} {count}: set --tp to a divisor of it")
    for count in (config.num_kv_heads, *(shape.num_kv_heads for shape in config.attention_shapes)):
        if not can_divide(count, size):
            raise ValueError(f"{size} ranks and {count} KV heads: set --tp to a divisor or a multiple of them")

    def own(num_kv_heads: int) -> int:
        return len(heads_of(num_kv_heads, shard.rank, size))

    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=own(config.num_kv_heads),
        layers=tuple(
            replace(
                layer,
                num_kv_heads=layer.num_kv_heads and own(layer.num_kv_heads),
                intermediate_size=layer.intermediate_size and layer.intermediate_size // size,
            )
            for layer in config.layers
        ),
        intermediate_size=config.intermediate_size // size,
        recurrent=config.recurrent and config.recurrent.divide(size),
    )


def check_sizes(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
    """ValueError if a number cannot be that of the weights beside it. entries: of all files of the checkpoint.

    Asked before anything is built by the numbers.
    """
    if config.num_layers > len(entries):
        raise ValueError(
            f"num_hidden_layers is {config.num_layers}, more than the {len(entries)} tensors of the checkpoint: "
            "they do not belong together"
        )
    if config.moe is not None:
        config.moe.check_size(config, sum(entry.num_bytes for entry in entries.values()))
