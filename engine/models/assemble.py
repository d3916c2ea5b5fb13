"""Builds a `Decoder` from a checkpoint, layer by layer, after checking that the checkpoint has what its table says."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.adapters.slots import Adapters
from engine.cpu.packed import PackedLinear
from engine.experts.moe import Experts, MixtureOfExperts
from engine.heads.decoder import HeadDecoder, HeadInputs
from engine.hybrids.recurrent import DeltaNet, GatedConv
from engine.layers.config import DeltaNetConfig
from engine.layers.embedding import Embedding, SummedEmbedding
from engine.layers.linear import (
    AdaptedGated,
    AdaptedLinear,
    Linear,
    Mlp,
    Normed,
    PlainLinear,
    Site,
    SummedLinear,
    WidenedLinear,
)
from engine.layers.token_inputs import InputBlock, TokenInputs
from engine.models.config import LayerConfig, ModelConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.table import Table, build_table, find_optional, shard_config
from engine.ranks import ONE_RANK, Ranks
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import PlainFormat
from engine.weights.table import Product, Shard

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # in old Llama checkpoints; the config implies it
IGNORED_PREFIX = "mtp."  # Qwen3.5's layers that predict several tokens ahead
OTHER_PARTS = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.",
    "visual.", "connector.", "image_newline",
)  # fmt: skip
UNUSED_PARTS = ("self_attn.k_", "self_attn.v_")  # of layers that read the keys and values of others
OF_EITHER = ("embedding", "lm_head")  # what a draft head may take from its model
MAX_FAULTS_SHOWN = 8


def build_decoder(
    config: ModelConfig, format: PlainFormat, ranks: Ranks = ONE_RANK, adapters: Adapters | None = None
) -> Decoder:
    """config: of the whole model, whose checkpoint has passed `check_tensors`. The format reads this rank's part.

    adapters: gets a site for each product that may have some; None: none may.
    """
    reader, table = format.reader, build_table(_as_stored(config, format.reader.checkpoint))
    config = shard_config(config, Shard(ranks.rank, ranks.size))
    embedding, head = format.embed(table.products["embedding"], _find_head(config, table, reader.checkpoint))
    top = _Builder(config, format, ranks, table)
    layers = [
        _Builder(config, format, ranks, layer, adapters, index).build_layer(own)
        for index, (own, layer) in enumerate(zip(config.layers, table.layers, strict=True))
    ]
    inputs = top.build_token_inputs() if config.token_input_size else None
    final_norm = top.norm("final_norm")
    reader.finish()
    return Decoder(config, top.sum_rows(embedding), layers, final_norm, head, format.ops, ranks, inputs, adapters)


def build_head(config: ModelConfig, format: PlainFormat, model: Decoder, target_ids: Tensor | None) -> HeadDecoder:
    """A draft head of `model`, from which it takes what its checkpoint, which has passed `check_tensors`, lacks."""
    reader, ranks, head = format.reader, model.ranks, config.draft_head
    assert head is not None
    config = _as_stored(config, reader.checkpoint)
    table = build_table(config)
    config = shard_config(config, Shard(ranks.rank, ranks.size))
    top = _Builder(config, format, ranks, table)
    layer = _Builder(config, format, ranks, table.layers[0]).build_layer(config.layers[0])
    inputs = HeadInputs(
        top.linear("fc"), top.norm("hidden_norm"), top.optional_norm("embedding_norm"), top.optional_norm("input_norm"),
        [top.norm(name) for name in table.vectors if name.startswith("fc_norm.")],
    )  # fmt: skip
    has = {name: next(table.products[name].stored()).name in reader.checkpoint.entries for name in OF_EITHER}
    embedding, lm_head = model.embedding, model.lm_head
    if has["embedding"]:
        embedding = top.sum_rows(Embedding(reader.fuse(table.products["embedding"])))
    if has["lm_head"]:
        product = table.products["lm_head"]
        lm_head = format.embed(product, product)[1]
    norm = top.norm("final_norm")
    reader.finish()
    return HeadDecoder(config, head, embedding, layer, norm, lm_head, format.ops, ranks, inputs, target_ids)


def _as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Files of one family may have each expert by itself, or all of a layer in one tensor (Qwen3.5)."""
    moe = config.moe
    if moe is None or moe.layout != "per_expert":
        return config
    is_stacked = any(name.endswith(f"{moe.experts}.down_proj") for name in checkpoint.entries)
    return replace(config, moe=replace(moe, layout="stacked")) if is_stacked else config


def _find_head(config: ModelConfig, table: Table, checkpoint: Checkpoint) -> Product:
    """Some tied checkpoints contain a copy of the embedding. If it differs, it is the head, as in transformers."""
    head, embedding = table.products["lm_head"], table.products["embedding"]
    names = [next(product.stored()).name for product in (head, embedding)]
    if names[0] not in checkpoint.entries:
        return embedding
    is_copy = config.is_tied and torch.equal(*map(checkpoint.tensor, names))
    return embedding if is_copy else head


class _Builder:
    """Reads one rank's part of a model or of a layer."""

    def __init__(
        self, config: ModelConfig, format: PlainFormat, ranks: Ranks, table: Table,
        adapters: Adapters | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        """config: of this rank's part. index: of the layer."""
        self._config = config
        self._format = format
        self._ranks = ranks
        self._table = table
        self._adapters = adapters
        self._index = index

    def linear(self, name: str) -> Linear:
        own = self._format.linear(self._table.products[name])
        return own if self._adapters is None else AdaptedLinear(own, self._add_site(self._adapters, name))

    def gated(self, name: str) -> Linear:
        """A product of gate and up, joined."""
        own = self._format.gated(self._table.products[name], self._config.activation)
        if self._adapters is None:
            return own
        return AdaptedGated(own, self._add_site(self._adapters, name, is_panelled=isinstance(own, PackedLinear)))

    def _add_site(self, adapters: Adapters, name: str, *, is_panelled: bool = False) -> Site:
        product, shard = self._table.products[name], self._format.reader.shard
        key = (self._index, name)
        return adapters.add_site(key, product.depth(shard), product.num_rows(shard), is_panelled=is_panelled)

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """[n]; None: there is none."""
        vector = self._table.vectors.get(name)
        return None if vector is None else self._format.reader.vector(vector, dtype)

    def wide(self, name: str) -> Tensor:
        """[n] float32"""
        return self._format.reader.vector(self._table.vectors[name], torch.float32)

    def norm(self, name: str) -> Tensor:
        """[n]; in float32 if it has an offset, which would round it otherwise."""
        offset = self._config.norm_offset
        return self.wide(name).add(offset) if offset else self._format.reader.vector(self._table.vectors[name])

    def optional_norm(self, name: str) -> Tensor | None:
        return self.norm(name) if name in self._table.vectors else None

    def build_token_inputs(self) -> TokenInputs:
        format, table = self._format, self._table.products["token_embedding"]
        embedding = self.sum_rows(Embedding(format.reader.fuse(table)))
        projection = self.linear("token_projection")
        return TokenInputs(embedding, projection, self.norm("token_norm"), format.ops, self._config.rms_eps)

    def build_layer(self, own: LayerConfig) -> DecoderLayer:
        recurrent = None if own.has_attention else self._build_recurrent()
        return DecoderLayer(
            before_attention=self.optional_norm("before_attention"),
            qkv_proj=self.linear("qkv_proj"),
            qk_norm=self._build_qk_norm(own),
            sinks=self.vector("sinks", torch.float32),
            o_proj=self._summed(self.linear("o_proj")),
            after_attention=self.optional_norm("after_attention"),
            before_mlp=self.optional_norm("before_mlp"),
            mlp=self._build_moe() if own.is_moe else self._summed(self._build_mlp("")),
            after_mlp=self.optional_norm("after_mlp"),
            input_block=self._build_input_block() if self._config.token_input_size else None,
            after_input=self.optional_norm("after_input"),
            scale=self.vector("scale"),
            recurrent=recurrent,
        )

    def _build_qk_norm(self, own: LayerConfig) -> Tensor | None:
        shape, is_wide = self._config.shape_of(own), self._config.qk_norm == "width"
        counts = {"q_norm": shape.num_heads, "k_norm": shape.num_kv_heads}
        norms = [
            self.norm(name).expand(1 if is_wide else count, -1)
            for name, count in counts.items()
            if name in self._table.vectors
        ]
        return torch.cat(norms, 1 if is_wide else 0) if norms else None

    def _build_recurrent(self) -> DeltaNet | GatedConv:
        reader, own = self._format.reader, self._config.recurrent
        conv = torch.cat(reader.weights(self._table.products["conv"])).to(reader.device, torch.float32)
        if not isinstance(own, DeltaNetConfig):
            return GatedConv(conv, self.vector("conv_bias", torch.float32))
        return DeltaNet(
            own.num_key_heads,
            own.num_value_heads,
            own.key_dim,
            own.value_dim,
            conv,
            decay_rate=-self.wide("log_decay").exp(),
            dt_bias=self.wide("dt_bias"),
            norm=self.wide("state_norm"),
            eps=self._config.rms_eps,
        )

    def _build_mlp(self, field: str) -> Linear:
        """This rank's part of the sum."""
        return Mlp(self.gated(f"{field}gate_up_proj"), self.linear(f"{field}down_proj"))

    def _build_input_block(self) -> InputBlock:
        return InputBlock(self.linear("input_gate"), self.linear("input_projection"), self._config.activation)

    def _build_moe(self) -> Linear:
        """All ranks choose the same experts."""
        reader, config, moe, products = self._format.reader, self._config, self._config.moe, self._table.products
        assert moe is not None
        weight, bias = reader.fuse(products["router"]), reader.bias(products["router"])
        router: Linear = WidenedLinear(weight) if moe.has_wide_router else PlainLinear(weight, bias)
        experts = self._format.experts(self._table.experts, config.activation)
        shared = self._build_mlp("shared.") if moe.shared else None
        if moe.norms is not None and shared is not None:
            router, experts, shared = self._add_norms(router, experts, shared)
        mixture = MixtureOfExperts(
            router,
            moe.routing,
            experts,
            bias=self.vector("choice_bias", torch.float32),
            expert_scale=self.vector("expert_scale", torch.float32),
            shared=shared,
            shared_gate=PlainLinear(reader.fuse(products["shared_gate"])) if moe.shared_gate else None,
        )
        return mixture if moe.norms else self._summed(mixture)

    def _add_norms(self, router: Linear, experts: Experts, mlp: Linear) -> tuple[Linear, Experts, Linear]:
        """The three with norms around them. Norms after them are of the ranks' sums."""
        ops, eps = self._format.ops, self._config.rms_eps
        if self._ranks.size > 1:
            experts, mlp = SummedLinear(experts, self._ranks), SummedLinear(mlp, self._ranks)
        return (
            Normed(router, ops, eps, self.wide("router_norm") * self._config.hidden_size**-0.5),
            Normed(experts, ops, eps, self.norm("before_experts"), self.norm("after_experts")),
            Normed(mlp, ops, eps, self.norm("before_shared"), self.norm("after_shared")),
        )

    def sum_rows(self, own: Embedding) -> Embedding:
        """A table of which each rank has some rows."""
        ranks = self._ranks
        return own if ranks.size == 1 else SummedEmbedding(own.weight, own, ranks.rank * len(own), ranks)

    def _summed(self, own: Linear) -> Linear:
        return own if self._ranks.size == 1 else SummedLinear(own, self._ranks)


def _is_ignored(config: ModelConfig, name: str) -> bool:
    """Tensors of other parts of the model, of layers after the last, which predict several tokens ahead, and unused."""
    prefix = f"{config.prefix}layers."
    number, _, rest = name.removeprefix(prefix).partition(".")
    if name.startswith(prefix) and number.isdecimal():
        layer = config.layers[int(number)] if int(number) < config.num_layers else None
        if layer is None or (layer.kv_layer is not None and rest.startswith(UNUSED_PARTS)):
            return True
    is_other = config.whole is not None and name.removeprefix("model.").startswith(OTHER_PARTS)
    return is_other or name.startswith(IGNORED_PREFIX) or name.endswith(IGNORED_SUFFIX)


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises ValueError naming every tensor that is missing, unexpected or mis-shaped (with both shapes)."""
    table, entries = build_table(_as_stored(config, checkpoint)), checkpoint.entries
    expected = {stored.name: stored.shape for stored in table.stored()}
    optional = find_optional(config, table)
    faults = [
        f"missing: {name}, expected shape {list(shape)}"
        for name, shape in expected.items()
        if name not in entries and name not in optional
    ]
    for name, entry in entries.items():
        if name not in expected and not _is_ignored(config, name):
            faults.append(f"unexpected: {name}, shape {list(entry.shape)}")
        elif name in expected and entry.shape != expected[name]:
            faults.append(
                f"mis-shaped: {name} has shape {list(entry.shape)}, config.json implies {list(expected[name])}"
            )
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS_SHOWN} more" if len(faults) > MAX_FAULTS_SHOWN else ""
        raise ValueError("the checkpoint does not fit its config.json: " + "; ".join(faults[:MAX_FAULTS_SHOWN]) + more)
