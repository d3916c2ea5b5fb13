"""Models with random weights in well-known shapes, made on the device: for checks without files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.engine import Engine, Loaded, assemble_engine
from engine.graph_shapes import PIECE_TOKENS
from engine.layers.linear import Quantization
from engine.models.assemble import build_decoder
from engine.models.config import ModelConfig
from engine.models.read_config import build_config
from engine.models.table import build_table
from engine.ops.choose import ops_for
from engine.weights.checkpoint import Checkpoint
from engine.weights.entry import TensorEntry
from engine.weights.formats import choose_format
from engine.weights.reader import ShardReader
from worker.scheduler import num_rows_for

PAGE_TOKENS = 16


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> Mapping[str, Any]:
    """A config.json."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }


SHAPES = {
    "1B": llama(2048, 8192, 16, 32, 8, 128_256, True),  # Llama-3.2-1B
    "3B": llama(3072, 8192, 28, 24, 8, 128_256, True),  # Llama-3.2-3B
    "8B": llama(4096, 14336, 32, 32, 8, 128_256, False),  # Llama-3-8B
    "70B": llama(8192, 28672, 80, 64, 8, 128_256, False),  # Llama-3-70B
    "tiny": llama(256, 512, 2, 4, 2, 1024, True),
}


class RandomCheckpoint(Checkpoint):
    """Tensors of a config's shapes, drawn when they are taken; scaled so that activations stay finite."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        shapes = {stored.name: stored.shape for stored in build_table(config).stored()}
        if config.is_tied:
            del shapes["lm_head.weight"]
        self._device = device
        self.entries = {
            name: TensorEntry(Path(), "BF16", shape, 0, 2 * torch.Size(shape).numel()) for name, shape in shapes.items()
        }

    def tensor(self, name: str, *, is_kept: bool = False) -> Tensor:
        """See `Checkpoint.tensor`, but on the device."""
        shape = self.entries[name].shape
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device).mul_(shape[1] ** -0.5)


def load_random(
    shape: str, device: torch.device, quantization: Quantization = "none", context_tokens: int = 0
) -> Loaded:
    """One of SHAPES in bfloat16, for contexts of at least `context_tokens`."""
    longest = max(SHAPES[shape]["max_position_embeddings"], context_tokens)
    config = build_config({**SHAPES[shape], "max_position_embeddings": longest})
    checkpoint = RandomCheckpoint(config, device)
    reader = ShardReader(checkpoint, torch.bfloat16, device, lambda done, total: None)
    decoder = build_decoder(config, choose_format(reader, ops_for(device), quantization, None))
    return Loaded(Path(shape), shape, decoder, config.kv_parts)


def build_random_engine(
    shape: str,
    device: torch.device,
    max_running: int,
    context_tokens: int,
    draft: str = "",
    quantization: Quantization = "none",
    has_graphs: bool = True,
    max_drafts: int = 0,
) -> Engine:
    """An engine for `max_running` sequences of `context_tokens`; warmed up, on a GPU with graphs for that many.

    max_drafts: tokens that a step may check besides; graphs for them too.
    """
    engine = assemble_engine(
        load_random(shape, device, quantization, context_tokens),
        load_random(draft, device, quantization, context_tokens) if draft else None,
        page_tokens=PAGE_TOKENS,
        num_rows=num_rows_for(max_running),
        size_pool=lambda *_sizes: (max_running * -(-context_tokens // PAGE_TOKENS), 0),
        max_context_tokens=context_tokens,
    )
    engine.warm_up(max_running * has_graphs, max_drafts, PIECE_TOKENS * has_graphs)
    return engine
