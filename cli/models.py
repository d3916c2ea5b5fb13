"""What the name of a model means before any process is started. Knows names and folders, no tensors."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TypeVar

import msgspec

from cli.gguf_models import locate_gguf
from engine.models.gguf_folder import GGUF
from engine.models.read_config import has_native_code, load_config
from engine.weights.files import is_path, list_shards, read_header
from runtime.config import DecodeConfig, PrefillConfig, ServeConfig
from runtime.config_parts import ANY_NAME, DEMO_MODEL, NO_DRAFT
from runtime.settings import ConfigError, flag

WorkerConfigT = TypeVar("WorkerConfigT", PrefillConfig, DecodeConfig)
FilePatterns = tuple[str, tuple[str, ...]]  # what it is, and the patterns of which one must match

TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model"]
CONFIGURATION: FilePatterns = ("configuration", ("config.json",))
TOKENIZER: FilePatterns = (
    "tokenizer",
    ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
)
WEIGHTS: FilePatterns = ("weights", ("*.safetensors", "*.gguf"))


def locate_model(model: str) -> str:
    """The folder of the demo model for "demo", or of a GGUF file; anything else as it is, a folder or a hub id."""
    return _demo_folder("target") if model == DEMO_MODEL else locate_gguf(model) or model


def locate_draft(model: str, draft_model: str) -> str:
    """The folder or hub id of the draft model that goes with `model`; empty for none."""
    if draft_model == "auto":
        return _demo_folder("draft") if model == DEMO_MODEL else ""
    return "" if draft_model == NO_DRAFT else locate_gguf(draft_model) or draft_model


def locate(config: WorkerConfigT) -> WorkerConfigT:
    """A worker's settings with both models as folders or hub ids. ConfigError when one cannot be used."""
    check_models(config)
    draft = locate_draft(config.model, config.draft_model) or NO_DRAFT
    return replace(config, model=locate_model(config.model), draft_model=draft)


def _demo_folder(part: str) -> str:
    folder = Path(str(resources.files("demo"))) / part
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the demo model is not in {folder}: install from a complete checkout, or set --model")
    return str(folder)


class MissingFilesError(ConfigError):
    """A model's folder lacks files. The folder of a hub id may: they are fetched when a process needs them."""


class _TokenizerFile(msgspec.Struct):
    """What shows that a file is a tokenizer.json; the rest is read by the gateway."""

    model: msgspec.Raw


def check_models(config: ServeConfig | PrefillConfig | DecodeConfig) -> list[Path | None]:
    """The folders of the model and its draft model, if it has one, as of `check_model`."""
    folders = [check_model(locate_model(config.model))]
    if draft := locate_draft(config.model, config.draft_model):
        folders.append(check_model(draft, (CONFIGURATION, WEIGHTS), "draft_model"))
    return folders


def check_model(
    model: str, needed: Sequence[FilePatterns] = (CONFIGURATION, TOKENIZER, WEIGHTS), option: str = "model"
) -> Path | None:
    """The folder of a model whose files are there and can be read: configuration, tokenizer, headers of weights.

    None for a hub id whose files are still to be fetched. ConfigError says what is wrong. `option`: the setting that
    names the model.
    """
    folder = find_folder(model, option)
    if folder is None:
        return None
    try:
        check_files(folder, needed, option)
    except MissingFilesError:
        if Path(model).expanduser() == folder:
            raise
        return None
    try:
        if CONFIGURATION in needed and has_native_code(folder):
            load_config(folder)  # other models are judged by transformers, in the workers
        if TOKENIZER in needed and (tokenizer := folder / "tokenizer.json").is_file():
            _check_tokenizer(tokenizer)
        if WEIGHTS in needed:
            for path in list_shards(folder):
                read_header(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"the model in {folder} cannot be used ({error}): set {flag(option)} to another") from error
    return folder


def find_folder(model: str, option: str = "model") -> Path | None:
    """A checkpoint's folder, or where a hub id was downloaded to; None for a hub id that is not on this machine."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    advice = f'set {flag(option)} to a folder, a hub id such as "Qwen/Qwen3-0.6B", or "{DEMO_MODEL}"'
    if is_path(model):
        kind = "file" if folder.suffix == GGUF else "folder"
        raise ConfigError(f"there is no {kind} {model}: {advice}")
    from huggingface_hub import snapshot_download  # not for models that are folders
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except HFValidationError as error:
        raise ConfigError(f"{model!r} is neither a folder nor a hub id: {advice}") from error
    except OSError:
        return None


def check_files(folder: Path, needed: Sequence[FilePatterns], option: str = "model") -> None:
    """Raise MissingFilesError that names what a model's folder lacks."""
    for what, patterns in needed:
        if not any(next(folder.glob(pattern), None) for pattern in patterns):
            raise MissingFilesError(
                f"the model in {folder} has no {what}: put {' or '.join(patterns[:2])} there, or set {flag(option)}"
            )


def _check_tokenizer(path: Path) -> None:
    try:
        msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no tokenizer: {error}") from error


def choose_served_names(given: Sequence[str], model: str) -> tuple[str, ...]:
    """The names of a model in requests, the first of which is no "*"."""
    named = tuple(name for name in given if name != ANY_NAME) or (choose_served_name(model),)
    return (*named, ANY_NAME) if ANY_NAME in given else named


def choose_served_name(model: str) -> str:
    """The name of a model in requests when none is set: "baton-demo", a hub id as it is, or a folder's name."""
    if model == DEMO_MODEL:
        return "baton-demo"
    folder = Path(model).expanduser()
    if folder.suffix == GGUF:
        return folder.stem
    return folder.resolve().name if folder.is_dir() or folder.is_absolute() else model


def fetch_tokenizer(model: str) -> str:
    """A folder with the model's tokenizer and configuration, downloaded or cached where `model` is a hub id."""
    model = locate_model(model)
    if is_path(model) or Path(model).expanduser().is_dir():
        return str(find_folder(model))
    from huggingface_hub import snapshot_download  # not for commands and models that need none

    try:
        return snapshot_download(model, allow_patterns=TOKENIZER_FILES)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):  # the hub is out of reach: workers may have downloaded it
            return snapshot_download(model, allow_patterns=TOKENIZER_FILES, local_files_only=True)
        raise ConfigError(
            f"model={model!r} is no folder and cannot be fetched ({error}): set --model to a folder"
        ) from error
