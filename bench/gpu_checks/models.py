"""Models with random weights in well-known shapes, made on the device: for checks without files."""

from pathlib import Path

import torch

from bench.roofline import SHAPES
from engine.catalogue import build_config
from engine.compose import LAYER_PARTS, FullEngine, assemble_engine, choose_format, open_device
from engine.cuda.graph_shapes import PIECE_TOKENS
from engine.engine import Loaded
from engine.layers.linear import Quantization
from engine.models.assemble import build_decoder
from engine.weights.reader import ShardReader
from tests.support.random_models import RandomCheckpoint
from worker.table import num_rows_for

PAGE_TOKENS = 16


def load_random(
    shape: str, device: torch.device, quantization: Quantization = "none", context_tokens: int = 0
) -> Loaded:
    """One of SHAPES in bfloat16, for contexts of at least `context_tokens`."""
    longest = max(SHAPES[shape]["max_position_embeddings"], context_tokens)
    config = build_config({**SHAPES[shape], "max_position_embeddings": longest})
    checkpoint = RandomCheckpoint(config, device)
    reader = ShardReader(checkpoint, torch.bfloat16, device, lambda done, total: None)
    format = choose_format(reader, open_device(device).ops, quantization)
    decoder = build_decoder(config, format, LAYER_PARTS)
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
) -> FullEngine:
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
