"""Which code runs a checkpoint: Baton's, or transformers'. Imports torch and transformers only for the latter."""

from pathlib import Path

from engine.models.config import ModelConfig
from engine.models.fallback_config import FallbackConfig
from engine.models.families import FAMILIES
from engine.models.json_values import read_json
from engine.models.read_config import WHOLE, load_config


def has_native_code(folder: Path) -> bool:
    """Whether the model_type is a family of Baton's. Raises FileNotFoundError or ValueError like `load_config`."""
    name = read_json(folder / "config.json").get("model_type")
    if not isinstance(name, str):
        raise ValueError(f"model_type {name!r} in config.json is not the name of a family of models")
    return name in [*FAMILIES, *WHOLE]


def load_any_config(folder: Path) -> ModelConfig | FallbackConfig:
    """`load_config` for any model. Without native code: by transformers on the meta device, in seconds."""
    if has_native_code(folder):
        return load_config(folder)
    from engine.models.fallback_probe import probe

    return probe(folder)
