"""Models for which Baton has no code. Imports transformers when there is one: it takes seconds."""

from pathlib import Path
from typing import cast

from engine.device import Device
from engine.fallback.config import FallbackConfig
from engine.models.decoder import Decoder
from engine.models.load import DTYPES, check_dtype
from engine.ranks import Ranks
from engine.weights.reader import OnProgress
from wire.files import read_json_object
from wire.names import Quantization


def probe_foreign(folder: Path) -> FallbackConfig:
    """Its config, by transformers on the meta device, in seconds."""
    from engine.fallback.probe import probe

    return probe(folder)


def open_foreign(
    folder: Path, dtype: str, device: Device, on_progress: OnProgress | None, quantization: Quantization,
    ranks: Ranks,
) -> Decoder:  # fmt: skip
    """A model that runs by transformers' code. It has the interface of a Decoder."""
    lacking = f"Baton has no code for model_type {read_json_object(folder / 'config.json').get('model_type')!r}"
    if ranks.size > 1:
        raise ValueError(f"{lacking}, so only one rank can compute it: set --tp 1")
    if quantization != "none":
        raise ValueError(f"{lacking}, so its weights cannot be rounded: set --quantization none")
    if dtype != "auto":
        check_dtype(dtype)
    from engine.fallback.load import load_fallback  # imports transformers, seconds

    return cast(Decoder, load_fallback(folder, DTYPES.get(dtype), device, on_progress))
