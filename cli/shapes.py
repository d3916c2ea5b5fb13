"""A model in numbers, by its name or folder: for what is planned and simulated. Reads config.json, no weights."""

import math
from pathlib import Path

from bench.gpu_checks.models import SHAPES
from bench.roofline import ModelShape
from cli.models import fetch_tokenizer
from engine.models.config import ModelConfig
from engine.models.read_config import build_config, load_config
from engine.models.table import build_table


def load_shape(model: str) -> ModelShape:
    """`model`: a folder, a hub id, "demo", or a key of SHAPES. ConfigError or ValueError says what is wrong with it."""
    if model in SHAPES:
        return shape_of(build_config(SHAPES[model]))
    return shape_of(load_config(Path(fetch_tokenizer(model))))


def shape_of(config: ModelConfig) -> ModelShape:
    table = build_table(config)
    sizes = {stored.name: math.prod(stored.shape) for stored in table.stored()}
    embedding, head = (sizes[next(product.stored()).name] for product in (table.embedding, table.lm_head))
    looked_up = 0 if config.is_tied else embedding
    if table.token_inputs is not None:
        looked_up += sizes[next(table.token_inputs.embedding.stored()).name]
    num_weights = sum(sizes.values()) - (head if config.is_tied else 0)
    num_idle = 0
    if config.moe is not None:
        expert = 3 * config.hidden_size * config.moe.inner_size
        num_moe = sum(layer.is_moe for layer in config.layers)
        num_idle = num_moe * expert * (config.moe.routing.num_experts - config.moe.routing.top_k)
    return ModelShape(
        num_weights=num_weights,
        num_active=num_weights - num_idle - looked_up,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_kv_heads=config.num_kv_heads,
        query_width=sum(config.num_heads * config.shape_of(layer).head_dim for layer in config.layers),
        kv_width=sum(shape.num_kv_heads * shape.head_dim for shape in config.attention_shapes),
        context_tokens=config.context_tokens,
        divisible=tuple(config.divisible.values()),
    )
