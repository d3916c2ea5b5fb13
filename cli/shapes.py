"""A model in numbers, by its name or folder: for what is planned and simulated. Reads config.json, no weights."""

import math
from pathlib import Path

from bench.gpu_checks.models import SHAPES
from bench.roofline import ModelShape
from cli.models import fetch_tokenizer
from engine.models.config import ModelConfig, build_config, load_config
from engine.models.table import EMBEDDING, HEAD, build_table


def load_shape(model: str) -> ModelShape:
    """`model`: a folder, a hub id, "demo", or a key of SHAPES. ConfigError or ValueError says what is wrong with it."""
    if model in SHAPES:
        return shape_of(build_config(SHAPES[model]))
    return shape_of(load_config(Path(fetch_tokenizer(model))))


def shape_of(config: ModelConfig) -> ModelShape:
    sizes = {stored.name: math.prod(stored.shape) for stored in build_table(config).stored()}
    num_weights = sum(sizes.values()) - (sizes[f"{HEAD}.weight"] if config.is_tied else 0)
    return ModelShape(
        num_weights=num_weights,
        num_active=num_weights - (0 if config.is_tied else sizes[f"{EMBEDDING}.weight"]),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        context_tokens=config.context_tokens,
        divisible=(config.num_heads, config.intermediate_size, config.vocab_size),
    )
