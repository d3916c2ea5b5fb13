"""The weights of a decoder by the names that assemble.py has for them: what each is called in a checkpoint, and how
ranks divide it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from engine.layer_config import DeltaNetConfig, GatedConvConfig, rope_order
from engine.models.config import DraftHead, LayerConfig, ModelConfig, Moe
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
    """config: of the whole model, or of a draft head. `find_optional` says what the checkpoint may lack."""
    hidden, words, prefix = undivided(config.hidden_size), Axis(config.vocab_size), config.prefix
    products = {
        "embedding": Product((module(f"{prefix}embed_tokens", words),), hidden),
        "lm_head": Product((module(config.head, words),), hidden),
    }
    vectors = {"final_norm": Vector(f"{prefix}{config.norms.final}.weight", hidden)}
    if size := config.token_input_size:
        of_all = undivided(config.num_layers * size)
        products |= {
            "token_embedding": Product((module(f"{prefix}embed_tokens_per_layer", words),), of_all),
            "token_projection": Product((module(f"{prefix}per_layer_model_projection", of_all),), hidden),
        }
        vectors["token_norm"] = Vector(f"{prefix}per_layer_projection_norm.weight", undivided(size))
    layers = tuple(_Layer(config, index).build() for index in range(config.num_layers))
    if config.draft_head is not None:
        layers = (_add_head(config, config.draft_head, layers[0], products, vectors),)
    return Table(products, vectors, layers=layers)


def _add_head(
    config: ModelConfig, head: DraftHead, layer: Table, products: dict[str, Product], vectors: dict[str, Vector]
) -> Table:
    """Adds what a draft head has beside its layer. Returns the layer."""
    hidden = undivided(config.hidden_size)
    joined, taps = undivided(2 * config.hidden_size), undivided(len(head.taps) * head.tap_size)
    vectors["hidden_norm"] = Vector(f"{config.prefix}hidden_norm.weight", hidden)
    products["lm_head"] = Product((module(config.head, Axis(head.vocab_size)),), hidden)
    if head.kind == "mtp":
        vectors["embedding_norm"] = Vector(f"{config.prefix}embedding_norm.weight", hidden)
        products["fc"] = Product((module(f"{config.prefix}fc", hidden),), joined)
        return layer
    products["fc"] = Product((module(f"{config.prefix}fc", hidden),), taps)
    if head.norm_before_fc:
        vectors["input_norm"] = Vector(f"{config.prefix}input_norm.weight", taps)
    if head.fc_norm:
        for index in range(len(head.taps)):
            vectors[f"fc_norm.{index}"] = Vector(f"{config.prefix}fc_norm.{index}.weight", undivided(head.tap_size))
    qkv = replace(layer.products["qkv_proj"], inputs=joined)
    return replace(layer, products={**layer.products, "qkv_proj": qkv})


def find_optional(config: ModelConfig, table: Table) -> set[str]:
    """Tensors that a checkpoint may lack: the lm_head of a tied model; what a draft head can take from the model."""
    names = ["embedding", "lm_head"] if config.draft_head is not None else ["lm_head"] if config.is_tied else []
    return {stored.name for name in names for stored in table.products[name].stored()}


class _Layer:
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
        config, layer, norms, hidden = self.config, self.layer, self.config.norms, self.hidden
        moe = config.moe if layer.is_moe else None
        self.add_norm("before_attention", norms.before_attention)
        self.add_norm("after_attention", norms.after_attention)
        self.add_norm("before_mlp", norms.before_mlp)
        self.add_norm("after_mlp", norms.after_mlp)
        if layer.has_attention or config.recurrent is None:
            self.add_attention()
        elif isinstance(config.recurrent, DeltaNetConfig):
            self.add_delta_net(config.recurrent, "linear_attn.")
        else:
            self.add_gated_conv(config.recurrent, "conv.")
        if moe is not None:
            self.add_moe(moe)
        else:
            self.add_mlp("", config.mlp.module, layer.intermediate_size)
        if config.token_input_size:
            own = undivided(config.token_input_size)
            self.add("input_gate", hidden, self.module("per_layer_input_gate", own))
            self.add("input_projection", own, self.module("per_layer_projection", hidden))
            self.add_norm("after_input", "post_per_layer_input_norm")
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
        if config.token_kv is not None:
            products, vectors = config.token_kv.weights(
                f"{self.prefix}self_attn.", config.num_heads, config.hidden_size, has_bias=config.has_qkv_bias
            )
            self.products |= products
            self.vectors |= vectors
            return
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

    def add_delta_net(self, own: DeltaNetConfig, name: str) -> None:
        keys, values = Axis(own.num_key_heads, own.key_dim), Axis(own.num_value_heads, own.value_dim)
        heads, channels = Axis(own.num_value_heads), [keys, keys, values]
        others = {"in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        rows = [self.module(name + other, axis) for other, axis in others.items()]
        self.add("qkv_proj", self.hidden, *packed(f"{self.prefix}{name}in_proj_qkv", channels), *rows)
        self.add_convolution(own.kernel, *packed(f"{self.prefix}{name}conv1d", channels))
        self.add("o_proj", values, self.module(f"{name}out_proj", self.hidden))
        self.add_vector("log_decay", f"{name}A_log", heads)
        self.add_vector("dt_bias", f"{name}dt_bias", heads)
        self.add_norm("state_norm", f"{name}norm", undivided(own.value_dim))

    def add_gated_conv(self, own: GatedConvConfig, name: str) -> None:
        channels, has_bias = Axis(own.num_heads, own.head_dim), own.has_bias
        self.add("qkv_proj", self.hidden, *packed(f"{self.prefix}{name}in_proj", [channels] * 3, has_bias))
        self.add_convolution(own.kernel, self.module(f"{name}conv", channels))
        self.add("o_proj", channels, self.module(f"{name}out_proj", self.hidden, has_bias))
        if has_bias:
            self.add_vector("conv_bias", f"{name}conv.bias", channels)

    def add_convolution(self, kernel: int, *parts: Part) -> None:
        self.add("conv", undivided(kernel), *(replace(part, is_conv=True) for part in parts))

    def add_mlp(self, field: str, name: str, inner_size: int | None) -> None:
        config, inner = self.config, Axis(inner_size or self.config.intermediate_size)
        names, has_bias = config.mlp, config.has_mlp_bias
        if config.packs_gate_up:
            gate_up = packed(f"{self.prefix}{name}.gate_up_proj", [inner, inner], has_bias)
        else:
            gate_up = tuple(self.module(f"{name}.{one}", inner, has_bias) for one in (names.gate, names.up))
        self.add(f"{field}gate_up_proj", self.hidden, *gate_up)
        self.add(f"{field}down_proj", inner, self.module(f"{name}.{names.down}", self.hidden, has_bias))

    def add_moe(self, moe: Moe) -> None:
        of_all, hidden = undivided(moe.routing.num_experts), self.hidden
        self.add("router", hidden, self.module(moe.router, of_all, moe.has_biases))
        for field, name in (("choice_bias", moe.choice_bias), ("expert_scale", moe.expert_scale)):
            if name is not None:
                self.add_vector(field, name, of_all)
        self.experts = tuple(self.build_expert(moe, index) for index in range(moe.routing.num_experts))
        if moe.shared:
            self.add_mlp("shared.", moe.shared, moe.shared_size or self.layer.intermediate_size)
        if moe.shared_gate:
            self.add("shared_gate", hidden, self.module(moe.shared_gate, undivided(1)))
        if moe.norms:
            self.add_vector("router_norm", moe.norms.router, hidden)
            self.vectors["before_shared"] = self.vectors.pop("before_mlp")
            self.add_norm("after_shared", moe.norms.after_mlp)
            self.add_norm("before_experts", moe.norms.before_experts)
            self.add_norm("after_experts", moe.norms.after_experts)

    def build_expert(self, moe: Moe, index: int) -> tuple[Product, Product]:
        hidden, inner, names = self.hidden, Axis(moe.inner_size), self.config.mlp
        if moe.layout == "per_expert":
            own = f"{moe.experts}.{index}."
            gate_up = tuple(self.module(own + one, inner) for one in (names.gate, names.up))
            return Product(gate_up, hidden), Product((self.module(own + names.down, hidden),), inner)
        takes_turns = moe.layout == "alternating"  # gate and up rows; else all gate rows come first

        def stacked(product: str, rows: Axis) -> Part:
            """Of all experts one tensor; alternating ones are transposed, with biases."""
            name = f"{self.prefix}{moe.experts}.{product}"
            bias = f"{name}_bias" if takes_turns else None
            return Part(name, rows, bias, index=index, num_stacked=moe.routing.num_experts, is_transposed=takes_turns)

        step, second = (2, 1) if takes_turns else (1, inner.size)
        both = replace(stacked("gate_up_proj", inner), num_stored=2 * inner.size, step=step)
        halves = tuple(replace(both, first=first) for first in (0, second))
        return Product(halves, hidden), Product((stacked("down_proj", hidden),), inner)


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
