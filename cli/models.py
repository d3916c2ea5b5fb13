"""What the name of a model means before any process is started. Knows names and folders, no tensors."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TypeVar

from runtime.config import DecodeConfig, PrefillConfig
from runtime.config_parts import ANY_NAME, DEMO_MODEL, NO_DRAFT
from runtime.settings import ConfigError

WorkerConfigT = TypeVar("WorkerConfigT", PrefillConfig, DecodeConfig)
FilePatterns = tuple[str, tuple[str, ...]]  # what it is, and the patterns of which one must match

TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model"]
CONFIGURATION: FilePatterns = ("configuration", ("config.json",))
TOKENIZER: FilePatterns = (
    "tokenizer",
    ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
)
WEIGHTS: FilePatterns = ("weights", ("*.safetensors",))


def locate_model(model: str) -> str:
    """The folder of the demo model for "demo"; anything else as it is, a folder or a hub id."""
    return _demo_folder("target") if model == DEMO_MODEL else model


def locate_draft(model: str, draft_model: str) -> str:
    """The folder or hub id of the draft model that goes with `model`; empty for none."""
    if draft_model == "auto":
        return _demo_folder("draft") if model == DEMO_MODEL else ""
    return "" if draft_model == NO_DRAFT else draft_model


def locate(config: WorkerConfigT) -> WorkerConfigT:
    """A worker's settings with both models as folders or hub ids."""
    draft = locate_draft(config.model, config.draft_model) or NO_DRAFT
    return replace(config, model=locate_model(config.model), draft_model=draft)


def _demo_folder(part: str) -> str:
    folder = Path(str(resources.files("demo"))) / part
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the demo model is not in {folder}: install from a complete checkout, or set --model")
    return str(folder)


def check_files(model: str, needed: Iterable[FilePatterns] = (CONFIGURATION, TOKENIZER, WEIGHTS)) -> None:
    """Raise ConfigError that names what a model's folder lacks. A hub id passes: its files are fetched later."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return
    for what, patterns in needed:
        if not any(next(folder.glob(pattern), None) for pattern in patterns):
            raise ConfigError(
                f"the model in {folder} has no {what}: put {' or '.join(patterns[:2])} there, or set --model"
            )


def choose_served_names(given: Sequence[str], model: str) -> tuple[str, ...]:
    """The names of a model in requests, the first of which is no "*"."""
    named = tuple(name for name in given if name != ANY_NAME) or (choose_served_name(model),)
    return (*named, ANY_NAME) if ANY_NAME in given else named


def choose_served_name(model: str) -> str:
    """The name of a model in requests when none is set: "baton-demo", a hub id as it is, or a folder's name."""
    if model == DEMO_MODEL:
        return "baton-demo"
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() or folder.is_absolute() else model


def fetch_tokenizer(model: str) -> str:
    """A folder with the model's tokenizer and configuration, downloaded or cached where `model` is a hub id."""
    model = locate_model(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder)
    from huggingface_hub import snapshot_download  # not for commands and models that need none

    try:
        return snapshot_download(model, allow_patterns=TOKENIZER_FILES)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):  # the hub is out of reach: workers may have downloaded it
            return snapshot_download(model, allow_patterns=TOKENIZER_FILES, local_files_only=True)
        raise ConfigError(
            f"model={model!r} is no folder and cannot be fetched ({error}): set --model to a folder"
        ) from error
