"""Reads files of checkpoints and adapters, made by strangers: refuses what is not a file, is too long or is not JSON.

Each ValueError names the file.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EACCES
from pathlib import Path
from typing import Any

MOST_BYTES = 256 << 20  # of a file that is read as a whole; the largest tokenizer.json have 40 MB
WHOLE = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # files that are read as a whole, by us or by libraries
MOST_CHARS = 1000  # of an error: it may quote a value
TOKENIZER = "tokenizer.json"
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


class DeniedError(PermissionError):
    """This user may not read something. One sentence that names it, its owner and the user, and what to change."""

    def __str__(self) -> str:
        return str(self.strerror)


def check_access(path: Path) -> None:
    """DeniedError if this user may not read the file, or enter and list the folder, links followed. May be missing."""
    try:
        wanted = os.R_OK | (os.X_OK if stat.S_ISDIR(path.stat().st_mode) else 0)
    except PermissionError:
        pass
    except OSError:  # missing: for the reader to say
        return
    else:
        if os.access(path, wanted, effective_ids=True):
            return
    real = Path(os.path.realpath(path))
    above = (folder for folder in reversed(real.parents) if not os.access(folder, os.X_OK, effective_ids=True))
    denied = next(above, real)
    found = denied.stat()
    verb = "enter" if stat.S_ISDIR(found.st_mode) else "read"
    detail = f"user {os.geteuid()} may not {verb} {denied}, which belongs to user {found.st_uid} with mode "
    raise DeniedError(EACCES, f"{detail}{stat.S_IMODE(found.st_mode):04o}: allow it, such as by chmod -R a+rX")


def check_file(path: Path, most_bytes: int | None = MOST_BYTES) -> int:
    """The bytes of a file that can be read, links followed. FileNotFoundError; ValueError if not a file, or longer.

    Raises DeniedError.
    """
    check_access(path)
    return _measure(path, most_bytes)


def _measure(path: Path, most_bytes: int | None) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'a folder')}, expected a file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise ValueError(f"{path} has {status.st_size} bytes, expected at most {most_bytes}")
    return status.st_size


def check_folder(folder: Path) -> None:
    """Refuses a folder with something that would hang or fill the memory of a library that opens it by name.

    Raises DeniedError for one that this user may not enter; files that it may not read are refused when they are read.
    """
    check_access(folder)
    for entry in os.scandir(folder):
        path = Path(entry.path)
        is_whole = path.suffix in WHOLE
        try:
            if is_whole or not entry.is_dir():
                _measure(path, MOST_BYTES if is_whole else None)
        except FileNotFoundError:  # a link to nothing
            continue


def read_text(path: Path) -> str:
    """The text of a file. FileNotFoundError if it is missing; ValueError if it is not UTF-8."""
    check_file(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def read_json(path: Path) -> Any:
    """The JSON value in a file. FileNotFoundError if it is missing; ValueError if it is not JSON."""
    return parse_json(read_text(path), path)


def read_json_object(path: Path) -> Mapping[str, Any]:
    """As `read_json`, for a file that must hold an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def parse_json(text: str | bytes, path: Path) -> Any:
    """`path`: for errors."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


@contextmanager
def named(path: Path) -> Iterator[None]:
    """ValueErrors name the file, unless they do so by themselves; so do those of a depth that no parser takes."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        said = f"{error}"[:MOST_CHARS]
        raise ValueError(said if str(path) in said else f"{path}: {said}") from error


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """As `named`, for libraries that trust what they read and may raise anything; Rust's panics are not Exceptions."""
    try:
        yield
    except (OSError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        said = " ".join(str(error).split())[:MOST_CHARS]
        if isinstance(error, ValueError) and str(path.parent) in said:
            raise
        raise ValueError(f"{path} cannot be used: {type(error).__name__}: {said}") from error


@contextmanager
def blamed_tokenizer(folder: Path) -> Iterator[None]:
    """As `blamed`, for a tokenizer: the error names that file of the folder which is wrong."""
    try:
        yield
    except (OSError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        from tokenizers import Tokenizer  # 0.1 s, which most that import this need not wait for

        if (path := folder / TOKENIZER).exists():
            with blamed(path):
                Tokenizer.from_file(str(path))
        with blamed(folder / "tokenizer_config.json"):
            raise error
