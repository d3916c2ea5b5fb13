"""Loads models for which Baton has no native code: weights by transformers, from safetensors alone.

Runs no code of a checkpoint and unpickles nothing. What cannot be served exactly is refused by name, before or after
the weights are read.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from engine.models.fallback_check import LIMITS, check
from engine.models.fallback_model import FallbackModel
from engine.models.fallback_probe import probe_config, read_config, refuse
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.reader import OnProgress

MAX_NAMES_SHOWN = 8


def load_fallback(
    folder: Path, dtype: torch.dtype | None, device: torch.device, on_progress: OnProgress | None = None
) -> FallbackModel:
    """Load the checkpoint in `folder` onto `device` and compare it with transformers alone.

    dtype: None is the checkpoint's own. Calls on_progress(done_bytes, total_bytes) before and after. Raises
    FileNotFoundError for a missing file, ValueError for a model that cannot be served or a checkpoint that lacks
    tensors.
    """
    config = read_config(folder)
    shape = probe_config(config)
    total_bytes = sum(entry.num_bytes for entry in SafetensorsCheckpoint(folder).entries.values())
    if on_progress:
        on_progress(0, total_bytes)
    library: Any = AutoModelForCausalLM
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, on stderr
    loaded, report = library.from_pretrained(
        folder, config=config, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False,
        use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True,
    )  # fmt: skip
    # transformers fills such tensors with random numbers
    if lacking := sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]):
        shown = ", ".join(lacking[:MAX_NAMES_SHOWN]) + (", ..." if len(lacking) > MAX_NAMES_SHOWN else "")
        raise ValueError(f"the checkpoint does not fit its config.json: missing or mis-shaped: {shown}")
    model = FallbackModel(loaded.to(device), shape)
    if model.dtype not in LIMITS:
        supported = ", ".join(str(known).removeprefix("torch.") for known in LIMITS)
        raise refuse(shape.family, f"its weights are {model.dtype}", f"set --dtype to one of {supported}")
    check(model)
    if on_progress:
        on_progress(total_bytes, total_bytes)
    return model
