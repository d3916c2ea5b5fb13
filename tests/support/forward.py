"""One forward of a model, without an engine."""

import torch
from torch import Tensor

from bench.batches import Part, pack
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.kv.pool import PoolShape
from engine.models.decoder import Decoder


def logits_of(decoder: Decoder, ids: list[int]) -> Tensor:
    """[n, V] of up to 128 tokens of a model whose layers are alike."""
    config = decoder.config
    shape = PoolShape(8, config.kv_parts, 16, decoder.dtype)
    batch = pack([Part(ids, 0, list(range(8)), len(ids))], 16, torch.device("cpu"))
    pool = torch.zeros(shape.sizes, dtype=decoder.dtype)
    return decoder.logits(decoder.forward(batch, pool, TorchSdpaAttention(config.attention_shapes[0])))
