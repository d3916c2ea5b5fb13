"""Medusa heads on the model's last hidden rows: no layers and no KV. Each draft is of a head of its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.device import Device
from engine.fallback.config import FallbackConfig
from engine.heads.decoder import DraftDecoder
from engine.heads.load import RenamedCheckpoint
from engine.heads.read_medusa import TOKEN_MAP, find_weights, heads_of, name_medusa, read_medusa
from engine.layers.linear import Linear, Quantization
from engine.models.assemble import LayerBuilder, check_tensors
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import OpenFormat, Parts, Source
from engine.models.table import build_table, shard_config
from engine.weights.checkpoint import Checkpoint, SafetensorsCheckpoint
from engine.weights.reader import ShardReader
from engine.weights.table import Shard
from wire.files import named


class MedusaDecoder(DraftDecoder):
    """Its rows are the model's, whatever was drafted since."""

    is_capturable = False  # a launch is a head's, by its depth

    def __init__(
        self, config: ModelConfig, model: Decoder, heads: Sequence[tuple[Sequence[Linear], Linear]],
        target_ids: Tensor | None,
    ) -> None:  # fmt: skip
        """config: of this rank's part. heads: residual blocks H -> H, and the product to logits, of each."""
        nothing = torch.empty(0, device=model.device)
        super().__init__(config, model.embedding, [], nothing, heads[0][1], model.ops, model.ranks)
        self._target_ids = target_ids
        self._heads = heads
        self._blocks = heads[0][0]
        self.most_drafts = len(heads)
        if isinstance(model.config, FallbackConfig):  # whose steps return logits
            self.reads = (model.config.depth,)

    def go_to(self, depth: int) -> None:
        self._blocks, self.lm_head = self._heads[min(depth, len(self._heads) - 1)]  # costs are measured with any number

    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        assert batch.hidden is not None, "Medusa heads without hidden rows"
        return batch.hidden

    def _before_head(self, hidden: Tensor) -> Tensor:
        for block in self._blocks:
            hidden = hidden + functional.silu(block(hidden))
        return hidden


def load_medusa(
    folder: Path, model: Decoder, device: Device, quantization: Quantization, parts: Parts
) -> MedusaDecoder:
    """The heads of a loaded model, in its dtype and on its device and ranks. Raises like `load_head`."""
    with named(folder / "config.json"):
        config = read_medusa(folder, model.config)
    source, ranks = find_weights(folder), model.ranks
    stored = SafetensorsCheckpoint(source)
    checkpoint = RenamedCheckpoint(stored, name_medusa(config, stored.entries))
    config = replace(config, draft_head=heads_of(config).as_stored(checkpoint.entries))
    given = model.config
    if not heads_of(config).has_products and isinstance(given, ModelConfig):  # sampled like the model's own logits
        config = replace(config, logits_divisor=given.logits_divisor, logits_softcap=given.logits_softcap)
    with named(source):
        check_tensors(config, checkpoint)
        shard_config(config, Shard(ranks.rank, ranks.size))
        target_ids = _read_token_map(stored, config)

    def build(open_format: OpenFormat) -> MedusaDecoder:
        """See `load_model`."""
        shard = Shard(ranks.rank, ranks.size)
        reader = ShardReader(checkpoint, model.dtype, model.device, lambda done, total: None, shard)
        format, own = open_format(reader, model.ops), heads_of(config)
        table = build_table(config)
        top = LayerBuilder(shard_config(config, shard), format, ranks, table, parts.layers)
        found = [table.products[f"lm_heads.{head}"] for head in range(own.num_products)]
        lm_heads = [format.embed(product, product)[1] for product in found] or [model.lm_head]
        heads = [
            ([top.linear(f"blocks.{head}.{layer}") for layer in range(own.num_layers)], lm_heads[head % len(lm_heads)])
            for head in range(own.num_heads)
        ]
        reader.finish()
        ids = None if target_ids is None else target_ids.to(model.device)
        return MedusaDecoder(shard_config(config, shard), model, heads, ids)

    return parts.build(build, Source(source, checkpoint, model.dtype, device, quantization, ranks, "medusa"))


def _read_token_map(stored: Checkpoint, config: ModelConfig) -> Tensor | None:
    """[words] int64: the model's ids of the heads' tokens; None: they are the same."""
    heads = heads_of(config)
    num_words = heads.vocab_size
    if num_words == config.vocab_size:
        return None
    if not heads.has_products or TOKEN_MAP not in stored.entries:
        raise ValueError(f"{TOKEN_MAP} or lm_heads are missing, for truncated_vocab_size {num_words}")
    found = stored.tensor(TOKEN_MAP).long()
    if found.shape != (num_words,) or not 0 <= int(found.min()) <= int(found.max()) < config.vocab_size:
        raise ValueError(f"{TOKEN_MAP} does not give {num_words} of the model's {config.vocab_size} tokens")
    return found
