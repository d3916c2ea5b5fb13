"""Builds a `Decoder` from a checkpoint, layer by layer, after checking that the checkpoint has what its table says."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from engine.layers.linear import (
    NO_ADDITIONS,
    Additions,
    Embedding,
    Linear,
    Mlp,
    ProductKey,
    SummedLinear,
)
from engine.layers.mixer import Mixer, Projection
from engine.models.config import LayerConfig, ModelConfig
from engine.models.decoder import Decoder, DecoderLayer, InputBlock, TokenInputs
from engine.models.table import Table, build_table, shard_config
from engine.ranks import ONE_RANK, Ranks
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import PlainFormat
from engine.weights.table import Product, Shard

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # in old Llama checkpoints; the config implies it
IGNORED_PREFIXES = ("mtp.", "score.")  # Qwen3.5's layers that predict several tokens ahead; heads with classes
OTHER_PARTS = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.",
    "visual.", "connector.", "image_newline",
)  # fmt: skip
UNUSED_PARTS = ("self_attn.k_", "self_attn.v_")  # of layers that read the keys and values of others
MAX_FAULTS_SHOWN = 8


def build_decoder(
    config: ModelConfig, format: PlainFormat, parts: "LayerParts", ranks: Ranks = ONE_RANK,
    additions: Additions = NO_ADDITIONS,
) -> Decoder:  # fmt: skip
    """config: of the whole model, whose checkpoint has passed `check_tensors`. The format reads this rank's part.

    additions: to products.
    """
    reader, table = format.reader, build_table(as_stored(config, format.reader.checkpoint))
    config = shard_config(config, Shard(ranks.rank, ranks.size))
    embedding, head = format.embed(table.products["embedding"], find_head(config, table, reader.checkpoint))
    top = LayerBuilder(config, format, ranks, table, parts)
    layers = [
        LayerBuilder(config, format, ranks, layer, parts, additions, index).build_layer(own)
        for index, (own, layer) in enumerate(zip(config.layers, table.layers, strict=True))
    ]
    inputs = None if config.token_inputs is None else parts.build_token_inputs(top)
    final_norm = top.norm("final_norm")
    reader.finish()
    return Decoder(config, top.sum_rows(embedding), layers, final_norm, head, format.ops, ranks, inputs, additions)


def as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """With its parts as the checkpoint has them."""
    return replace(config, moe=config.moe and config.moe.as_stored(checkpoint.entries))


def find_head(config: ModelConfig, table: Table, checkpoint: Checkpoint) -> Product:
    """Some tied checkpoints contain a copy of the embedding. If it differs, it is the head, as in transformers."""
    head, embedding = table.products["lm_head"], table.products["embedding"]
    names = [next(product.stored()).name for product in (head, embedding)]
    if names[0] not in checkpoint.entries:
        return embedding
    is_copy = config.is_tied and torch.equal(*map(checkpoint.tensor, names))
    return embedding if is_copy else head


@dataclass(frozen=True, slots=True, eq=False)
class SummedEmbedding(Embedding):
    """A table divided over ranks by rows: each rank contributes zeros for rows it lacks, and the results are added."""

    own: Embedding  # the rows of the tokens from `first` on
    first: int
    ranks: Ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        own = token_ids - self.first
        is_here = (own >= 0) & (own < len(self.own))
        rows = self.own(torch.where(is_here, own, 0))
        return self.ranks.all_reduce_(rows.mul_(is_here[:, None]))


def refuse(*_parts: object) -> NoReturn:
    """Stands in for a part that is not installed: ValueError."""
    raise ValueError("this model needs a part of Baton that is not installed: engine/compose.py names none")


@dataclass(frozen=True, slots=True)
class LayerParts:
    """How layers are built that are not attention and a dense MLP; engine/compose.py names all."""

    build_mixer: Callable[["LayerBuilder"], Mixer] = refuse  # of `ModelConfig.recurrent`, in the place of attention
    build_experts: Callable[["LayerBuilder"], Linear] = refuse  # of `ModelConfig.moe`: H -> H, summed over ranks
    build_token_inputs: Callable[["LayerBuilder"], TokenInputs] = refuse  # of `ModelConfig.token_inputs`
    build_input_block: Callable[["LayerBuilder"], InputBlock] = refuse  # the same of one layer
    build_projection: Callable[["LayerBuilder"], Projection] = refuse  # of `ModelConfig.token_kv`


class LayerBuilder:
    """Reads one rank's part of a model or of a layer."""

    def __init__(
        self, config: ModelConfig, format: PlainFormat, ranks: Ranks, table: Table,
        parts: LayerParts, additions: Additions = NO_ADDITIONS, index: int = 0,
    ) -> None:  # fmt: skip
        """config: of this rank's part. index: of the layer."""
        self.config = config
        self.format = format
        self.ranks = ranks
        self.table = table
        self.parts = parts
        self.additions = additions
        self.index = index

    def linear(self, name: str) -> Linear:
        return self.additions.wrap(self.format.linear(self.table.products[name]), *self._describe(name))

    def gated(self, name: str) -> Linear:
        """A product of gate and up, joined."""
        own = self.format.gated(self.table.products[name], self.config.activation)
        return self.additions.wrap_gated(own, *self._describe(name))

    def _describe(self, name: str) -> tuple[ProductKey, int, list[int]]:
        product, shard = self.table.products[name], self.format.reader.shard
        return (self.index, name), product.depth(shard), product.num_rows(shard)

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """[n]; None: there is none."""
        vector = self.table.vectors.get(name)
        return None if vector is None else self.format.reader.vector(vector, dtype)

    def wide(self, name: str) -> Tensor:
        """[n] float32"""
        return self.format.reader.vector(self.table.vectors[name], torch.float32)

    def norm(self, name: str) -> Tensor:
        """[n]; in float32 if it has an offset, which would round it otherwise."""
        offset = self.config.norm_offset
        return self.wide(name).add(offset) if offset else self.format.reader.vector(self.table.vectors[name])

    def optional_norm(self, name: str) -> Tensor | None:
        return self.norm(name) if name in self.table.vectors else None

    def build_layer(self, own: LayerConfig) -> DecoderLayer:
        mixer = None if own.has_attention else self.parts.build_mixer(self)
        return DecoderLayer(
            before_attention=self.optional_norm("before_attention"),
            qkv_proj=self.linear("qkv_proj"),
            qk_norm=self._build_qk_norm(own),
            sinks=self.vector("sinks", torch.float32),
            o_proj=self.summed(self.linear("o_proj")),
            after_attention=self.optional_norm("after_attention"),
            before_mlp=self.optional_norm("before_mlp"),
            mlp=self.parts.build_experts(self) if own.is_moe else self.summed(self.build_mlp("")),
            after_mlp=self.optional_norm("after_mlp"),
            input_block=None if self.config.token_inputs is None else self.parts.build_input_block(self),
            after_input=self.optional_norm("after_input"),
            scale=self.vector("scale"),
            mixer=mixer,
            projection=None if self.config.token_kv is None else self.parts.build_projection(self),
        )

    def _build_qk_norm(self, own: LayerConfig) -> Tensor | None:
        shape, is_wide = self.config.shape_of(own), self.config.qk_norm == "width"
        counts = {"q_norm": shape.num_heads, "k_norm": shape.num_kv_heads}
        norms = [
            self.norm(name).expand(1 if is_wide else count, -1)
            for name, count in counts.items()
            if name in self.table.vectors
        ]
        return torch.cat(norms, 1 if is_wide else 0) if norms else None

    def build_mlp(self, field: str) -> Linear:
        """This rank's part of the sum."""
        return Mlp(self.gated(f"{field}gate_up_proj"), self.linear(f"{field}down_proj"))

    def sum_rows(self, own: Embedding) -> Embedding:
        """A table of which each rank has some rows."""
        ranks = self.ranks
        return own if ranks.size == 1 else SummedEmbedding(own.weight, own, ranks.rank * len(own), ranks)

    def summed(self, own: Linear) -> Linear:
        return own if self.ranks.size == 1 else SummedLinear(own, self.ranks)


def _is_ignored(config: ModelConfig, name: str) -> bool:
    """Tensors of other parts of the model, of layers after the last, which predict several tokens ahead, and unused."""
    prefix = f"{config.prefix}layers."
    number, _, rest = name.removeprefix(prefix).partition(".")
    if name.startswith(prefix) and number.isdecimal():
        layer = config.layers[int(number)] if int(number) < config.num_layers else None
        if layer is None or (layer.kv_layer is not None and rest.startswith(UNUSED_PARTS)):
            return True
    is_other = config.whole is not None and name.removeprefix("model.").startswith(OTHER_PARTS)
    return is_other or name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIX)


def check_tensors(config: ModelConfig, checkpoint: Checkpoint, may_lack: Collection[str] = ()) -> None:
    """Raises ValueError naming every tensor that is missing, unexpected or mis-shaped (with both shapes).

    may_lack: products, beside the lm_head of a tied model.
    """
    table, entries = build_table(as_stored(config, checkpoint)), checkpoint.entries
    expected = {stored.name: stored.shape for stored in table.stored()}
    lacking = [*may_lack, *(["lm_head"] if config.is_tied else [])]
    optional = {stored.name for name in lacking for stored in table.products[name].stored()}
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
