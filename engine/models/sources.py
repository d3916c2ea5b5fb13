"""A model's folder as its config and its tensors, whatever the format of its files."""

from dataclasses import replace
from pathlib import Path

from engine.models.choose import has_native_code, load_any_config
from engine.models.config import ModelConfig
from engine.models.fallback_config import FallbackConfig
from engine.models.gguf import GgufCheckpoint
from engine.models.gguf_config import PAIRED, architecture_of
from engine.models.read_config import load_config
from engine.models.table import build_table
from engine.weights.checkpoint import Checkpoint, SafetensorsCheckpoint
from engine.weights.files import list_shards
from engine.weights.gguf_file import read_gguf
from engine.weights.quantised import QuantisedCheckpoint

LANGUAGE_MODEL = "model.language_model."


def open_any_model(folder: Path) -> tuple[ModelConfig | FallbackConfig, Checkpoint]:
    """`open_model` for any model. Without native code: by transformers on the meta device, in seconds."""
    return open_model(folder) if has_native_code(folder) else (load_any_config(folder), SafetensorsCheckpoint(folder))


def open_model(folder: Path) -> tuple[ModelConfig, Checkpoint]:
    """Reads configurations and headers. Raises FileNotFoundError for a missing file, ValueError for a bad one."""
    config, shards = load_config(folder), list_shards(folder)
    if shards[0].suffix != ".gguf":
        plain = SafetensorsCheckpoint(folder)
        if f"{LANGUAGE_MODEL}embed_tokens.weight" in plain.entries:  # of some copies of models with several parts
            config = replace(config, prefix=LANGUAGE_MODEL, head="lm_head")
        if config.scheme is None:
            return config, plain
        wanted = {tensor.name for tensor in build_table(config).stored()}
        return config, QuantisedCheckpoint(plain, config.scheme, wanted)
    headers = [read_gguf(shard) for shard in shards]
    architecture = architecture_of(headers[0].metadata)
    if architecture in PAIRED:
        config = replace(config, rope_is_interleaved=True)  # so the rows are ordered anew where they are read
    stored = {name: entry for header in headers for name, entry in header.entries.items()}
    return config, GgufCheckpoint(architecture, config, stored)
