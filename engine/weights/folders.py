"""Where files are kept that take time to make: built kernels, packed weights, digests, folders of GGUF files."""

import os
import tempfile
from functools import cache
from pathlib import Path

import structlog

from wire.private_folders import UnsafeFolderError, open_private

log = structlog.get_logger()


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
