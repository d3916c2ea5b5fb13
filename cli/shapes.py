"""A model in numbers, by its name or folder: for what is planned and simulated. Reads config.json, no weights."""

from pathlib import Path

from bench.gpu_checks.models import SHAPES
from cli.models import fetch_tokenizer
from engine.models.read_config import build_config, load_config
from worker.limits import ModelShape, shape_of


def load_shape(model: str) -> ModelShape:
    """`model`: a folder, a hub id, "demo", or a key of SHAPES. ConfigError or ValueError says what is wrong with it."""
    if model in SHAPES:
        return shape_of(build_config(SHAPES[model]))
    return shape_of(load_config(Path(fetch_tokenizer(model))))
