"""Folders that no other user can write: what is loaded from them, or trusted, is this user's or root's.

A path is opened component by component from `/`, so that nothing can be swapped between its check and its use. Knows
owners, modes and links; nothing of what is kept in a folder.
"""

import grp
import os
import pwd
import stat
from contextlib import suppress
from errno import ELOOP, EPERM
from functools import cache
from pathlib import Path

import structlog

IS_PRIVATE = "BATON_CACHE_IS_PRIVATE"  # environment variable: 1: no other user reaches the folders above ours
MAX_LINKS = 40  # in a path, as in Linux
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASS = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)  # needs no right to list a folder
log = structlog.get_logger()


class UnsafeFolderError(PermissionError):
    """Another user could write there. `strerror` is one sentence that names the folder and what to change."""

    def __init__(self, detail: str) -> None:
        super().__init__(EPERM, detail)

    def __str__(self) -> str:
        return str(self.strerror)


def open_private(path: Path) -> int:
    """A descriptor of the folder `path`, which is this user's alone: no link, mode 0700; made if it is missing.

    The folders above it are as `open_guarded` wants them. Raises UnsafeFolderError, OSError.
    """
    above = open_guarded(path.parent)
    try:
        return open_child(above, path.name, path)
    finally:
        os.close(above)


def open_guarded(path: Path) -> int:
    """A descriptor of the folder `path`, where no other user can replace what is ours; made (0700) if it is missing.

    It and all folders above belong to root or this user, and no other user can write there unless it is sticky. Links
    are followed if root or this user made them. Raises UnsafeFolderError, OSError.
    """
    fd, at, todo, num_links = os.open("/", _PASS), Path("/"), list(path.absolute().parts[1:]), 0
    try:
        while True:
            _check_guarded(os.fstat(fd), at)
            if not todo:
                return os.open(".", _FOLDER | os.O_RDONLY, dir_fd=fd)
            name = todo.pop(0)
            target = _read_link(fd, name, at / name)
            if target is None:
                fd, at = _replace(fd, _open_or_make(fd, name, _PASS)), at / name
                continue
            if (num_links := num_links + 1) > MAX_LINKS:
                raise OSError(ELOOP, f"{path} leads through more than {MAX_LINKS} links")
            todo = [part for part in (*target.parts, *todo) if part != "/"]
            if target.is_absolute():
                fd, at = _replace(fd, os.open("/", _PASS)), Path("/")
    finally:
        os.close(fd)


def open_child(parent: int, name: str, path: Path, is_made: bool = True) -> int:
    """A descriptor of `name` in the folder `parent`: this user's alone, as in `open_private`.

    `path`: for messages. `is_made`: if it is missing.
    """
    flags = _FOLDER | os.O_RDONLY
    try:
        fd = _open_or_make(parent, name, flags) if is_made else os.open(name, flags, dir_fd=parent)
    except OSError as error:
        if stat.S_ISLNK(_mode_of(parent, name)):
            raise UnsafeFolderError(f"{path} is a link: name the folder that it leads to, or remove it") from error
        raise
    found = os.fstat(fd)
    problem = ""
    if found.st_uid != os.geteuid():
        problem = f"{path} belongs to user {found.st_uid}, who could write there: name another folder, or remove it"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"{path} has mode {_show(found)}, so others could have written there: remove it, or name another"
    if problem:
        os.close(fd)
        raise UnsafeFolderError(problem)
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.fchmod(fd, 0o700)
    return fd


def _check_guarded(found: os.stat_result, path: Path) -> None:
    others = stat.S_IWOTH | (0 if _is_own_group(found.st_gid, os.geteuid()) else stat.S_IWGRP)
    if found.st_uid not in (0, os.geteuid()):
        problem = f"{path} belongs to user {found.st_uid}"
    elif found.st_mode & others and not found.st_mode & stat.S_ISVTX:
        problem = f"{path} has mode {_show(found)}"
    else:
        return
    _refuse(path, f"{problem}, so another user could replace what is kept below it")


def _refuse(path: Path, problem: str) -> None:
    """Raise UnsafeFolderError, unless the user vouches for all folders above ours."""
    if os.environ.get(IS_PRIVATE) != "1":
        raise UnsafeFolderError(
            f"{problem}: change that, name another folder, or set {IS_PRIVATE}=1 where no other user reaches it"
        )
    _report_skipped(path, problem)


@cache  # once for each
def _report_skipped(path: Path, problem: str) -> None:
    log.warning("a folder is trusted unchecked", folder=str(path), reason=f"{IS_PRIVATE}=1, and {problem}")


def _read_link(parent: int, name: str, path: Path) -> Path | None:
    """Where `name` leads; None if it is not a link."""
    if not stat.S_ISLNK(_mode_of(parent, name)):
        return None
    owner = os.stat(name, dir_fd=parent, follow_symlinks=False).st_uid
    if owner not in (0, os.geteuid()):
        _refuse(path, f"{path} is a link of user {owner}, so another user chooses what is kept below it")
    return Path(os.readlink(name, dir_fd=parent))


def _mode_of(parent: int, name: str) -> int:
    """The mode of `name` in the folder; 0 if it does not exist."""
    with suppress(FileNotFoundError):
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    return 0


def _open_or_make(parent: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        return os.open(name, flags, dir_fd=parent)


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new


@cache
def _is_own_group(group: int, user: int) -> bool:
    """Whether it is the group that a system gives to each user: of the same name, with no other member."""
    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def _show(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"
