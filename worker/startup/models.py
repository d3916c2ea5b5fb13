"""Finds what a model's name means, before any process is started: a folder, a GGUF file, a hub's repository, the demo.

Knows names and files, loads no tensors.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from engine.catalogue import has_native_code, load_config
from engine.formats.gguf_file import read_header
from engine.formats.gguf_folder import gguf_cache, make_gguf_folder
from engine.formats.scheme import read_scheme
from engine.heads.read_head import is_draft_head, read_head
from engine.weights.files import GGUF, is_path, list_shards
from runtime.config import DecodeConfig, PrefillConfig, RolesConfig
from runtime.config_parts import ANY_NAME, DEMO_MODEL, MAX_NAME_CHARS, MINILM, NO_DRAFT, SMOLLM2
from runtime.settings import ConfigError, flag
from wire.files import DeniedError, check_access, check_folder, named, read_text
from wire.names import MTP
from worker.startup.gguf_files import fetch_from_hub, fetch_head, fetch_minilm, fetch_smollm2

WorkerConfigT = TypeVar("WorkerConfigT", PrefillConfig, RolesConfig, DecodeConfig)
Part = Literal["configuration", "tokenizer", "weights"]  # of a model's folder

FILES: dict[Part, tuple[str, ...]] = {  # part |-> the patterns of which one must match
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
    "weights": ("*.safetensors", "*.gguf"),
}
TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model"]
HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<kind>[\w.-]+)")  # "owner/repository:Q4_K_M"


class _TokenizerFile(msgspec.Struct):
    """The field that shows that a file is a tokenizer.json; the gateway reads the rest."""

    model: msgspec.Raw


def locate_model(model: str, only_head: bool = False) -> str:
    """The folder of the demo model for "demo", or of a GGUF file; anything else as it is, a folder or a hub id.

    only_head: as in `locate_gguf`.
    """
    if model == MINILM:
        return str(fetch_minilm())
    return _demo_folder("target") if model == DEMO_MODEL else locate_gguf(model, only_head) or model


def locate_draft(model: str, draft_model: str) -> str:
    """The folder or hub id of the draft model that goes with `model`, or "mtp"; empty for none."""
    if draft_model == "auto":
        return _demo_folder("draft") if model == DEMO_MODEL else ""
    return "" if draft_model == NO_DRAFT else locate_gguf(draft_model) or draft_model


def locate(config: WorkerConfigT) -> WorkerConfigT:
    """A worker's settings with both models as folders or hub ids. ConfigError when one cannot be used."""
    check_models(config.model, config.draft_model)
    draft = locate_draft(config.model, config.draft_model) or NO_DRAFT
    name = config.model_name or choose_served_name(config.model)
    return replace(config, model=locate_model(config.model), draft_model=draft, model_name=name)


def _demo_folder(part: str) -> str:
    folder = Path(str(resources.files("demo"))) / part
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the demo model is not in {folder}: install from a complete checkout, or set --model")
    return str(folder)


def locate_gguf(model: str, only_head: bool = False) -> str | None:
    """The folder of a model that is a GGUF file, made and fetched if it is not there yet; None for other models.

    only_head: of a hub's file. The folder then has a configuration and a tokenizer, but no weights.
    """
    path = Path(model).expanduser()
    _check_access(path, "model")
    try:
        if model == SMOLLM2:
            path = fetch_smollm2()
        elif (found := HUB_ID.fullmatch(model)) and not path.exists():
            if only_head:
                return str(fetch_head(found["repository"], found["kind"]))
            path = fetch_from_hub(found["repository"], found["kind"])
        elif path.suffix != GGUF or not path.is_file():
            return None
        return str(make_gguf_folder(path, gguf_cache()))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {model} cannot be used ({error}): set --model to another") from error


def check_models(model: str, draft_model: str) -> list[Path | None]:
    """The folders of the model and of what drafts for it, if something does, as of `check_model`."""
    folder = check_model(locate_model(model))
    draft = locate_draft(model, draft_model)
    if not draft:
        return [folder]
    drafting = folder if draft == MTP else find_folder(draft, "draft_model")
    try:
        is_head = draft == MTP or (drafting is not None and is_draft_head(drafting))
        if is_head and folder is not None and drafting is not None and has_native_code(folder):  # workers judge others
            read_head(drafting, load_config(folder), is_mtp=draft == MTP)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"the draft head in {drafting} cannot be used ({error}): set --draft-model to another, or none"
        ) from error
    return [folder, drafting if is_head else check_model(draft, ("configuration", "weights"), "draft_model")]


def check_model(model: str, needed: Sequence[Part] = tuple(FILES), option: str = "model") -> Path | None:
    """The folder of a model whose files are there and can be read: configuration, tokenizer, headers of weights.

    None for a hub id whose files are still to be fetched. ConfigError says what is wrong. `option`: the setting that
    names the model.
    """
    folder = find_folder(model, option)
    if folder is None:
        return None
    for part in needed:
        if not any(next(folder.glob(pattern), None) for pattern in FILES[part]):
            if Path(model).expanduser() != folder:
                return None  # files of a hub id are fetched when a process needs them
            names = " or ".join(FILES[part][:2])
            raise ConfigError(f"the model in {folder} has no {part}: put {names} there, or set {flag(option)}")
    try:
        check_folder(folder)
        if "configuration" in needed and has_native_code(folder):
            config = load_config(folder)  # other models are judged by transformers, in the workers
            if config.quantization is not None:
                with named(folder / "config.json"):
                    read_scheme(config.quantization)
        if "tokenizer" in needed and (tokenizer := folder / "tokenizer.json").is_file():
            _check_tokenizer(tokenizer)
        if "weights" in needed:
            for path in list_shards(folder):
                read_header(path)
    except DeniedError as error:
        raise _refuse_denied(error, option) from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"the model in {folder} cannot be used ({error}): set {flag(option)} to another") from error
    return folder


def _check_access(path: Path, option: str) -> None:
    try:
        check_access(path)
    except DeniedError as error:
        raise _refuse_denied(error, option) from error


def _refuse_denied(error: DeniedError, option: str) -> ConfigError:
    return ConfigError(f"{error}, or set {flag(option)} to another")


def _check_tokenizer(path: Path) -> None:
    with named(path):
        msgspec.json.decode(read_text(path), type=_TokenizerFile)


def find_folder(model: str, option: str = "model") -> Path | None:
    """A checkpoint's folder, or where a hub id was downloaded to; None for a hub id that is not on this machine."""
    folder = Path(model).expanduser()
    _check_access(folder, option)
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


def fetch_tokenizer(model: str) -> str:
    """A folder with the model's tokenizer and configuration, downloaded or cached where `model` is a hub id.

    Needs no torch; weights are not fetched for it.
    """
    model = locate_model(model, only_head=True)
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


def name_models(models: Sequence[str], served_name: Sequence[str]) -> dict[str, str]:
    """The name of each model in requests |-> the model. ConfigError if two have one name."""
    if len(models) == 1:
        return {choose_served_names(served_name, models[0])[0]: models[0]}
    named: dict[str, str] = {}
    for text in models:
        name, _, model = text.partition("=")
        if not model or not name or "/" in name or Path(text).expanduser().exists():
            name, model = choose_served_name(text), text
        if name in named or len(name) > MAX_NAME_CHARS:
            wanted = f"names that differ, of up to {MAX_NAME_CHARS} characters, such as --model NAME={model}"
            raise ConfigError(f"model={text!r} cannot be used: --model needs {wanted}")
        named[name] = model
    return named


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
    _check_access(folder, "model")
    return folder.resolve().name if folder.is_dir() or folder.is_absolute() else model
