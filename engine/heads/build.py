"""A draft head from a checkpoint."""

from torch import Tensor

from engine.heads.config import OF_EITHER, head_of
from engine.heads.decoder import HeadDecoder, HeadInputs
from engine.layers.linear import Embedding
from engine.models.assemble import LayerBuilder, LayerParts, as_stored
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.table import build_table, shard_config
from engine.weights.formats import PlainFormat
from engine.weights.table import Shard


def build_head(
    config: ModelConfig, format: PlainFormat, model: Decoder, target_ids: Tensor | None, parts: LayerParts
) -> HeadDecoder:
    """A draft head of `model`, from which it takes what its checkpoint, which has passed `check_tensors`, lacks."""
    reader, ranks, head = format.reader, model.ranks, head_of(config)
    config = as_stored(config, reader.checkpoint)
    table = build_table(config)
    config = shard_config(config, Shard(ranks.rank, ranks.size))
    top = LayerBuilder(config, format, ranks, table, parts)
    layer = LayerBuilder(config, format, ranks, table.layers[0], parts).build_layer(config.layers[0])
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
