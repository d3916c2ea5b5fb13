"""Where files are kept that take time to make: built kernels, packed weights, digests, folders of GGUF files.

Workers of a host share them.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import structlog

from wire.private_folders import UnsafeFolderError, open_private

log = structlog.get_logger()

SMALLEST_FILE_BYTES = 256 << 20  # for less, each process makes its own
LOCK_S, LOCK_POLL_S = 600.0, 0.05


class CannotShareError(Exception):
    """There is no file, and it cannot be written; the message is one line for the user."""


def cache_folder() -> Path:
    """Where files are kept that take time to make: the first of `list_cache_folders`."""
    return list_cache_folders()[0]


def list_cache_folders() -> list[Path]:
    """$XDG_CACHE_HOME/baton or ~/.cache/baton, then a folder under the system's temporary one: at least one in all.

    Code is loaded from there, so folders are left out where another user could write: the log says so once.
    Raises OSError if there is none and none can be made.
    """
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folders = []
    for folder in (Path(home) / "baton", Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"):
        try:
            os.close(open_private(folder))
        except UnsafeFolderError as error:
            _report_left_out(folder, error.strerror)
        except OSError:
            continue
        else:
            folders += [folder] if os.access(folder, os.W_OK) else []
    if not folders:
        folders = [Path(tempfile.mkdtemp(prefix="baton-"))]
        os.close(open_private(folders[0]))
    return folders


@cache  # once for each
def _report_left_out(folder: Path, reason: str) -> None:
    log.warning("a cache folder is not used", folder=str(folder), reason=reason)


@contextmanager
def locked(path: Path, wait_s: float | None = None) -> Iterator[None]:
    """Holds the lock file; the system frees it when the process dies. CannotShareError after LOCK_S, or `wait_s`."""
    deadline = time.monotonic() + (LOCK_S if wait_s is None else wait_s)
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise CannotShareError(f"another process has held {path} for {LOCK_S:.0f} s") from error
                time.sleep(LOCK_POLL_S)  # flock has no time-out
        yield
