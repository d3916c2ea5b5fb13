"""Loads the draft head of a model."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.catalogue import load_config
from engine.device import Device
from engine.heads.build import build_head
from engine.heads.config import OF_EITHER, head_of
from engine.heads.decoder import HeadDecoder
from engine.heads.read_head import name_eagle3, name_mtp, read_head
from engine.layers.linear import Quantization
from engine.models.assemble import check_tensors
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import OpenFormat, Parts, Source
from engine.models.table import check_sizes
from engine.weights.checkpoint import Checkpoint, SafetensorsCheckpoint, StoredMatrix
from engine.weights.files import list_shards
from engine.weights.reader import ShardReader
from engine.weights.table import Shard
from wire.files import named
from wire.kv_layout import KvPart


class RenamedCheckpoint(Checkpoint):
    """Some tensors of another checkpoint, under other names."""

    def __init__(self, stored: Checkpoint, names: Mapping[str, str]) -> None:
        """names: here |-> there."""
        self.dtypes = stored.dtypes
        self.entries = {name: stored.entries[theirs] for name, theirs in names.items()}
        self._stored, self._names = stored, names

    def tensor(self, name: str, *, is_kept: bool = False) -> Tensor:
        return self._stored.tensor(self._names[name], is_kept=is_kept)

    def coded(self, name: str, index: int | None = None) -> StoredMatrix | None:
        return self._stored.coded(self._names[name], index)


def load_head(
    folder: Path, model: Decoder, device: Device, quantization: Quantization, parts: Parts, *, is_mtp: bool
) -> tuple[HeadDecoder, tuple[KvPart, ...]]:
    """A draft head of a loaded model, in its dtype and on its device and ranks, and its KV over all ranks.

    is_mtp: from the model's own folder.

    Raises like `load_model`; ValueError also if it is the head of another model.
    """
    is_native = isinstance(model.config, ModelConfig)
    context_tokens = model.config.context_tokens
    own = load_config(folder).within(context_tokens) if is_mtp and is_native else model.config  # of all ranks
    config = read_head(folder, own, is_mtp=is_mtp)
    ranks, stored = model.ranks, SafetensorsCheckpoint(folder)
    names = name_mtp(own, stored.entries) if is_mtp and isinstance(own, ModelConfig) else name_eagle3(stored.entries)
    checkpoint: Checkpoint = RenamedCheckpoint(stored, names)
    if config.quantization is not None:
        with named(list_shards(folder)[0]):
            checkpoint = parts.decode(config, parts.read_scheme(config.quantization), checkpoint)
    with named(list_shards(folder)[0]):
        check_sizes(config, checkpoint.entries)
        target_ids = _read_target_ids(stored, config, model.device)
        if target_ids is not None and len(target_ids) < own.vocab_size and "lm_head.weight" not in checkpoint.entries:
            raise ValueError(f"lm_head.weight is missing, for draft_vocab_size {len(target_ids)}")
    if config.vocab_size != own.vocab_size:
        path = folder / "config.json"
        raise ValueError(f"{path}: its vocab_size is {config.vocab_size}, the model's {own.vocab_size}")
    with named(list_shards(folder)[0]):
        check_tensors(config, checkpoint, OF_EITHER)

    def build(open_format: OpenFormat) -> HeadDecoder:
        """See `load_model`."""
        shard = Shard(ranks.rank, ranks.size)
        reader = ShardReader(checkpoint, model.dtype, model.device, lambda done, total: None, shard)
        return build_head(config, open_format(reader, model.ops), model, target_ids, parts.layers)

    part = "mtp" if is_mtp else "head"
    source = Source(folder, checkpoint, model.dtype, device, quantization, ranks, part)
    return parts.build(build, source), config.kv_parts


def _read_target_ids(stored: Checkpoint, config: ModelConfig, device: torch.device) -> Tensor | None:
    """[draft vocabulary] int64: the model's ids of a head's tokens; None: they are the same. `d2t` has differences."""
    head = head_of(config)
    if "d2t" not in stored.entries:
        if head.vocab_size != config.vocab_size:
            raise ValueError(f"d2t is missing, for draft_vocab_size {head.vocab_size} of {config.vocab_size}")
        return None
    differences = stored.tensor("d2t").long()
    found = differences + torch.arange(len(differences))
    if found.shape != (head.vocab_size,) or not 0 <= int(found.min()) <= int(found.max()) < config.vocab_size:
        raise ValueError(f"d2t does not give {head.vocab_size} of the model's {config.vocab_size} tokens")
    return found.to(device)
