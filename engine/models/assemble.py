"""Builds a `Decoder` from a checkpoint, layer by layer, after checking that the checkpoint has what its table says."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.layers.embedding import Embedding, SummedEmbedding
from engine.layers.head import WidenedLinear
from engine.layers.linear import Linear, Mlp, Normed, PlainLinear, SummedLinear
from engine.layers.moe import Experts, MixtureOfExperts
from engine.layers.recurrent import DeltaNet, GatedConv
from engine.layers.recurrent_config import DeltaNetConfig
from engine.layers.token_inputs import InputBlock, TokenInputs
from engine.models.config import LayerConfig, ModelConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.mixer_table import DeltaNetTable, GatedConvTable
from engine.models.table import (
    InputBlockTable,
    LayerTable,
    MlpTable,
    ModelTable,
    MoeNormTable,
    MoeTable,
    TokenInputTable,
    build_table,
    shard_config,
)
from engine.ranks import ONE_RANK, Ranks
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import PlainFormat
from engine.weights.table import Product, Shard, Vector

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # in old Llama checkpoints; the config implies it
IGNORED_PREFIX = "mtp."  # Qwen3.5's layers that predict several tokens ahead
OTHER_PARTS = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.",
    "visual.",
)  # fmt: skip
UNUSED_PARTS = ("self_attn.k_", "self_attn.v_")  # of layers that read the keys and values of others
MAX_FAULTS_SHOWN = 8


def build_decoder(config: ModelConfig, format: PlainFormat, ranks: Ranks = ONE_RANK) -> Decoder:
    """config: of the whole model, whose checkpoint has passed `check_tensors`. The format reads this rank's part."""
    reader, table = format.reader, build_table(_as_stored(config, format.reader.checkpoint))
    config = shard_config(config, Shard(ranks.rank, ranks.size))
    embedding, head = format.embed(table.embedding, _find_head(config, table, reader.checkpoint))
    builder = _Builder(config, format, ranks)
    inputs = builder.build_token_inputs(table.token_inputs) if table.token_inputs else None
    layers = [builder.build_layer(own, layer) for own, layer in zip(config.layers, table.layers, strict=True)]
    final_norm = builder.norm(table.final_norm)
    reader.finish()
    return Decoder(config, builder.sum_rows(embedding), layers, final_norm, head, format.ops, ranks, inputs)


def _as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Files of one family may have each expert by itself, or all of a layer in one tensor (Qwen3.5)."""
    moe = config.moe
    if moe is None or moe.layout != "per_expert":
        return config
    is_stacked = any(name.endswith(f"{moe.experts}.down_proj") for name in checkpoint.entries)
    return replace(config, moe=replace(moe, layout="stacked")) if is_stacked else config


def _find_head(config: ModelConfig, table: ModelTable, checkpoint: Checkpoint) -> Product:
    """Some tied checkpoints contain a copy of the embedding. If it differs, it is the head, as in transformers."""
    head, embedding = (next(product.stored()).name for product in (table.lm_head, table.embedding))
    if head not in checkpoint.entries:
        return table.embedding
    is_copy = config.is_tied and torch.equal(checkpoint.borrow(head), checkpoint.borrow(embedding))
    return table.embedding if is_copy else table.lm_head


class _Builder:
    """Reads the layers of one rank."""

    def __init__(self, config: ModelConfig, format: PlainFormat, ranks: Ranks) -> None:
        """config: of this rank's part."""
        self._config = config
        self._format = format
        self._ranks = ranks

    def build_token_inputs(self, table: TokenInputTable) -> TokenInputs:
        format = self._format
        embedding = self.sum_rows(Embedding(format.reader.fuse(table.embedding)))
        return TokenInputs(
            embedding, format.linear(table.projection), self.norm(table.norm), format.ops, self._config.rms_eps
        )

    def build_layer(self, own: LayerConfig, table: LayerTable) -> DecoderLayer:
        format, config, mixer = self._format, self._config, table.mixer
        shape, is_wide = config.shape_of(own), config.qk_norm == "width"
        counts = (1, 1) if is_wide else (shape.num_heads, shape.num_kv_heads)
        norms = [
            self.norm(vector).expand(count, -1)
            for vector, count in zip((mixer.q_norm, mixer.k_norm), counts, strict=True)
            if vector is not None
        ]
        mlp = (
            self._build_moe(table.mlp) if isinstance(table.mlp, MoeTable) else self._summed(self._build_mlp(table.mlp))
        )
        return DecoderLayer(
            before_attention=self._optional_norm(table.before_attention),
            qkv_proj=format.linear(mixer.qkv_proj),
            qk_norm=torch.cat(norms, 1 if is_wide else 0) if norms else None,
            sinks=None if mixer.sinks is None else format.reader.vector(mixer.sinks, torch.float32),
            o_proj=self._summed(format.linear(mixer.o_proj)),
            after_attention=self._optional_norm(table.after_attention),
            before_mlp=self._optional_norm(table.before_mlp),
            mlp=mlp,
            after_mlp=self._optional_norm(table.after_mlp),
            input_block=self._build_input_block(table.input_block) if table.input_block else None,
            after_input=self.norm(table.input_block.after) if table.input_block else None,
            scale=None if table.scale is None else format.reader.vector(table.scale),
            recurrent=None if mixer.recurrent is None else self._build_recurrent(mixer.recurrent),
        )

    def _build_recurrent(self, table: DeltaNetTable | GatedConvTable) -> DeltaNet | GatedConv:
        reader, own = self._format.reader, self._config.recurrent

        def read(vector: Vector) -> Tensor:
            return reader.vector(vector, torch.float32)

        product = table.weight if isinstance(table, GatedConvTable) else table.conv
        conv = torch.cat(reader.weights(product)).to(reader.device, torch.float32)
        if isinstance(table, GatedConvTable):
            return GatedConv(conv, None if table.bias is None else read(table.bias))
        assert isinstance(own, DeltaNetConfig)
        return DeltaNet(
            own.num_key_heads, own.num_value_heads, own.key_dim, own.value_dim, conv,
            decay_rate=-read(table.log_decay).exp(), dt_bias=read(table.dt_bias), norm=read(table.norm),
            eps=self._config.rms_eps,
        )  # fmt: skip

    def norm(self, vector: Vector) -> Tensor:
        """[n]; in float32 if it has an offset, which would round it otherwise."""
        reader, offset = self._format.reader, self._config.norm_offset
        return reader.vector(vector, torch.float32).add(offset) if offset else reader.vector(vector)

    def _optional_norm(self, vector: Vector | None) -> Tensor | None:
        return None if vector is None else self.norm(vector)

    def _build_mlp(self, table: MlpTable) -> Linear:
        """This rank's part of the sum."""
        gated = self._format.gated(table.gate_up_proj, self._config.activation)
        return Mlp(gated, self._format.linear(table.down_proj))

    def _build_input_block(self, table: InputBlockTable) -> InputBlock:
        return InputBlock(
            self._format.linear(table.gate), self._format.linear(table.projection), self._config.activation
        )

    def _build_moe(self, table: MoeTable) -> Linear:
        """All ranks choose the same experts."""
        format, reader, moe = self._format, self._format.reader, self._config.moe
        assert moe is not None
        weight, bias = reader.fuse(table.router), reader.bias(table.router)
        router: Linear = WidenedLinear(weight) if moe.has_wide_router else PlainLinear(weight, bias)
        experts = format.experts([(one.gate_up_proj, one.down_proj) for one in table.experts], self._config.activation)
        shared = None if table.shared is None else self._build_mlp(table.shared)
        shared_gate = None if table.shared_gate is None else PlainLinear(reader.fuse(table.shared_gate))
        if table.norms is not None and shared is not None:
            router, experts, shared = self._add_norms(table.norms, router, experts, shared)
        mixture = MixtureOfExperts(
            router,
            moe.routing,
            experts,
            bias=None if table.choice_bias is None else reader.vector(table.choice_bias, torch.float32),
            expert_scale=None if table.expert_scale is None else reader.vector(table.expert_scale, torch.float32),
            shared=shared,
            shared_gate=shared_gate,
        )
        return mixture if table.norms else self._summed(mixture)

    def _add_norms(
        self, table: MoeNormTable, router: Linear, experts: Experts, mlp: Linear
    ) -> tuple[Linear, Experts, Linear]:
        """The three with norms around them. Norms after them are of the ranks' sums."""
        ops, eps, config = self._format.ops, self._config.rms_eps, self._config
        if self._ranks.size > 1:
            experts, mlp = SummedLinear(experts, self._ranks), SummedLinear(mlp, self._ranks)
        scale = self._format.reader.vector(table.router, torch.float32) * config.hidden_size**-0.5
        return (
            Normed(router, ops, eps, scale),
            Normed(experts, ops, eps, self.norm(table.before_experts), self.norm(table.after_experts)),
            Normed(mlp, ops, eps, self.norm(table.before_mlp), self.norm(table.after_mlp)),
        )

    def sum_rows(self, own: Embedding) -> Embedding:
        """A table of which each rank has some rows."""
        ranks = self._ranks
        return own if ranks.size == 1 else SummedEmbedding(own, ranks.rank * len(own), ranks)

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
    is_other = config.prefix != "model." and name.removeprefix("model.").startswith(OTHER_PARTS)
    return is_other or name.startswith(IGNORED_PREFIX) or name.endswith(IGNORED_SUFFIX)


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises ValueError naming every tensor that is missing, unexpected or mis-shaped (with both shapes)."""
    table, entries = build_table(_as_stored(config, checkpoint)), checkpoint.entries
    expected = {stored.name: stored.shape for stored in table.stored()}
    optional = {stored.name for stored in table.lm_head.stored()} if config.is_tied else set()
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
