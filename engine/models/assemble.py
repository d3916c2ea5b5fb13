"""Builds a `Decoder` from a checkpoint, layer by layer, after checking that the checkpoint has what its table says."""

import torch
from torch import Tensor

from engine.layers.embedding import SummedEmbedding
from engine.layers.linear import Linear, SummedLinear
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.table import LayerTable, ModelTable, build_table, shard_config
from engine.ranks import ONE_RANK, Ranks
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import PlainFormat
from engine.weights.table import Product, Shard

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # in old Llama checkpoints; the config implies it
MAX_FAULTS_SHOWN = 8


def build_decoder(config: ModelConfig, format: PlainFormat, ranks: Ranks = ONE_RANK) -> Decoder:
    """config: of the whole model, whose checkpoint has passed `check_tensors`. The format reads this rank's part."""
    reader, table = format.reader, build_table(config)
    config = shard_config(config, Shard(ranks.rank, ranks.size))
    embedding, head = format.embed(table.embedding, _find_head(config, table, reader.checkpoint))
    layers = [_build_layer(layer, config, format, ranks) for layer in table.layers]
    final_norm = reader.vector(table.final_norm)  # [H]
    reader.finish()
    if ranks.size > 1:
        embedding = SummedEmbedding(embedding, ranks.rank * len(embedding), ranks)
    return Decoder(config, embedding, layers, final_norm, head, format.ops, ranks)


def _find_head(config: ModelConfig, table: ModelTable, checkpoint: Checkpoint) -> Product:
    """Some tied checkpoints contain a copy of the embedding. If it differs, it is the head, as in transformers."""
    head, embedding = (next(product.stored()).name for product in (table.lm_head, table.embedding))
    if head not in checkpoint.entries:
        return table.embedding
    is_copy = config.is_tied and torch.equal(checkpoint.borrow(head), checkpoint.borrow(embedding))
    return table.embedding if is_copy else table.lm_head


def _build_layer(table: LayerTable, config: ModelConfig, format: PlainFormat, ranks: Ranks) -> DecoderLayer:
    reader = format.reader

    def summed(product: Product) -> Linear:
        own = format.linear(product)
        return own if ranks.size == 1 else SummedLinear(own, ranks)

    qk_norm: Tensor | None = None
    if table.q_norm is not None and table.k_norm is not None:
        q_norm = reader.vector(table.q_norm).expand(config.num_heads, -1)  # [Hq, D]
        k_norm = reader.vector(table.k_norm).expand(config.num_kv_heads, -1)  # [Hkv, D]
        qk_norm = torch.cat((q_norm, k_norm))
    return DecoderLayer(
        input_norm=reader.vector(table.input_norm),
        qkv_proj=format.linear(table.qkv_proj),
        qk_norm=qk_norm,
        o_proj=summed(table.o_proj),
        mlp_norm=reader.vector(table.mlp_norm),
        gate_up_proj=format.gated(table.gate_up_proj),
        down_proj=summed(table.down_proj),
    )


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises ValueError naming every tensor that is missing, unexpected or mis-shaped (with both shapes)."""
    table, entries = build_table(config), checkpoint.entries
    expected = {stored.name: stored.shape for stored in table.stored()}
    optional = {stored.name for stored in table.lm_head.stored()} if config.is_tied else set()
    faults = [
        f"missing: {name}, expected shape {list(shape)}"
        for name, shape in expected.items()
        if name not in entries and name not in optional
    ]
    for name, entry in entries.items():
        if name not in expected and not name.endswith(IGNORED_SUFFIX):
            faults.append(f"unexpected: {name}, shape {list(entry.shape)}")
        elif name in expected and entry.shape != expected[name]:
            faults.append(
                f"mis-shaped: {name} has shape {list(entry.shape)}, config.json implies {list(expected[name])}"
            )
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS_SHOWN} more" if len(faults) > MAX_FAULTS_SHOWN else ""
        raise ValueError("the checkpoint does not fit its config.json: " + "; ".join(faults[:MAX_FAULTS_SHOWN]) + more)
