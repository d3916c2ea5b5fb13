"""Pages of one rank's pool as files: a tier below the pool, on a disk or in memory (/dev/shm). A slot is a page, too.

    DIR / what the pages are: model, format, ranks / number of the owner / key        one file a page

Each process owns one folder, which it locks: only there it writes and evicts, so its files are bounded. It reads those
of the other owners, too. A file is whole or it is not used: its checksum covers what it is of as well as its bytes, so
a torn, changed or foreign file is a miss. Checksums are against accidents: that no other user writes here is for
wire/private_folders.py. All names are looked up below a descriptor that it has checked, and no link is followed.
"""

import fcntl
import os
import secrets
import shutil
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from weakref import finalize

import numpy as np
import structlog
from numpy.typing import NDArray

from kvtransfer.reader import PageStore
from wire.page_keys import NamedPage
from wire.private_folders import open_child, open_guarded, open_private

MAGIC = b"BATONKV1"  # a change of the format is another number
HEADER = struct.Struct(
    "<8s16s16sII"
)  # magic, what the pages are, key, whether draft KV is complete, CRC-32 of all else
LOAD_BYTES = 16 << 20  # pages loaded or saved at once
NUM_READERS = 4  # threads: one checks 2 GB/s
OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
PAUSE_S = 60.0  # between attempts to write, after one failed, and between warnings about bad files
log = structlog.get_logger()


class KeyFollower(Protocol):
    """Follows which keys have files. Its methods return at once."""

    def gain(self, key: bytes, /) -> None:
        """There is one now."""

    def lose(self, key: bytes, /) -> None:
        """There is none any more."""


class PageFiles:
    """One folder of files. Calls may come from several threads; they take milliseconds to seconds."""

    def __init__(self, root: Path, pages_of: bytes, max_bytes: int) -> None:
        """`pages_of`: 16 bytes that are equal for pools whose pages are alike. Raises OSError."""
        self._pages_of = pages_of
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards what follows
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # key |-> bytes of its file; next to evict first
        self._follower: KeyFollower | None = None
        self.num_bytes = 0
        self._paused_until = 0.0  # no writes before
        self._silent_until = 0.0  # no warnings about bad files before
        self.num_bad = 0  # files that could not be used
        home = root / pages_of.hex()
        self._root = _open_root(root)
        finalize(self, os.close, self._root)  # not when it is closed: a thread may be writing then
        self._home = open_child(self._root, home.name, home)
        finalize(self, os.close, self._home)
        self.store = _name_store(self._home)  # equal for all owners of this home
        self._lock_fd, self._own = _lock_one(self._home, home)
        self.folder = home / self._own  # for messages
        self._others: list[str] = []
        self.look_for_others()
        self._strangers = _list_strangers(self._root, f"{home.name}/{self._own}")
        self._read_folder()
        free = os.fstatvfs(self._root)
        if (room := free.f_bavail * free.f_frsize + self.num_bytes) < max_bytes:
            log.warning("less room for KV than allowed", folder=str(root), mib=room >> 20, allowed_mib=max_bytes >> 20)

    def _read_folder(self) -> None:
        found = []
        with _opened(self._home, self._own) as fd, os.scandir(fd) as entries:
            for entry in entries:
                key = bytes.fromhex(entry.name) if _is_hex(entry.name) and entry.is_file(follow_symlinks=False) else b""
                if key:
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime_ns, key, stat.st_size))
                elif entry.name != LOCK:
                    os.unlink(entry.name, dir_fd=fd)  # one that was being written
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self.num_bytes += size
        self._evict()

    def report_to(self, follower: KeyFollower) -> None:
        """Tell it which keys have files here, and what changes."""
        with self._lock:
            self._follower = follower
            for key in self._sizes:
                follower.gain(key)

    def look_for_others(self) -> None:
        """Read from folders of owners that came after this one, too."""
        self._others = [name for name in _list_owners(self._home) if name != self._own]

    @property
    def num_files(self) -> int:
        return len(self._sizes)

    def has(self, key: bytes) -> bool:
        """Whether a file is there; perhaps it cannot be used."""
        return key in self._sizes or any(_exists(self._home, f"{other}/{key.hex()}") for other in self._others)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were useful now. The first becomes the youngest: the others are of no use without it."""
        with self._lock:
            for key in reversed(keys):
                if key in self._sizes:
                    self._sizes.move_to_end(key)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, key: bytes, row: NDArray[np.uint8]) -> bool | None:
        """Fill `row`; returns whether it has the draft model's KV. None: there is no such file that can be used."""
        for owner in (self._own, *self._others):
            header = bytearray(HEADER.size)
            try:
                fd = os.open(f"{owner}/{key.hex()}", os.O_RDONLY | OPEN, dir_fd=self._home)
            except OSError:
                continue
            try:
                num_read = os.readv(fd, [header, row.data, bytearray(1)])
                *fields, has_draft, checksum = HEADER.unpack(header)
                is_whole = num_read == HEADER.size + len(row) and fields == [MAGIC, self._pages_of, key]
                if is_whole and checksum == _sum(header, row):
                    with suppress(OSError):
                        os.utime(fd)
                    return bool(has_draft)
                self._drop_bad(key, owner, f"{num_read} bytes, or what they are of, or their checksum")
            except OSError as error:
                self._drop_bad(key, owner, str(error))
            finally:
                os.close(fd)
        return None

    def _drop_bad(self, key: bytes, owner: str, reason: str) -> None:
        self.num_bad += 1
        if (now := time.monotonic()) >= self._silent_until:
            self._silent_until = now + PAUSE_S
            path = str(self.folder.with_name(owner) / key.hex())
            log.warning("a KV file cannot be used: counts as missing", path=path, wrong=reason, so_far=self.num_bad)
        if owner == self._own:
            self._drop(key)

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, key: bytes, row: NDArray[np.uint8], has_draft: bool) -> None:
        """Save a page. Nothing happens, apart from a warning, where that is not possible now."""
        size = HEADER.size + len(row)
        if time.monotonic() < self._paused_until or size > self._max_bytes:
            return
        fields = HEADER.pack(MAGIC, self._pages_of, key, has_draft, 0)
        header = HEADER.pack(MAGIC, self._pages_of, key, has_draft, _sum(fields, row))
        path = f"{self._own}/{key.hex()}"
        new = f"{path}.new"
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN, 0o600, dir_fd=self._home)
            try:
                num_written = os.writev(fd, [header, row.data])
                while num_written < size:
                    num_written += os.pwrite(fd, row.data[num_written - HEADER.size :], num_written)
            finally:
                os.close(fd)
            os.replace(new, path, src_dir_fd=self._home, dst_dir_fd=self._home)
        except FileExistsError:  # another thread is writing it
            return
        except OSError as error:
            self._paused_until = time.monotonic() + PAUSE_S
            log.warning(
                "KV cannot be saved; serving goes on without, and this is tried again", folder=str(self.folder),
                reason=str(error), seconds=PAUSE_S,
            )  # fmt: skip
            with suppress(OSError):
                os.unlink(new, dir_fd=self._home)
            return
        with self._lock:
            self.num_bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size
            if self._follower is not None:
                self._follower.gain(key)
        self._evict()

    def _evict(self) -> None:
        """Remove files until they are within bounds: first those of models that no process serves now."""
        while True:
            with self._lock:
                if self.num_bytes + sum(size for _, size in self._strangers) <= self._max_bytes:
                    return
                stranger = self._strangers.pop(0)[0] if self._strangers else None
                key = next(iter(self._sizes), b"")
            if stranger is not None:
                _remove_unlocked(self._root, stranger)
            else:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        with self._lock:
            self.num_bytes -= self._sizes.pop(key, 0)
            if self._follower is not None:
                self._follower.lose(key)
        with suppress(OSError):
            os.unlink(f"{self._own}/{key.hex()}", dir_fd=self._home)

    def close(self) -> None:
        """Another process may own the folder from now on."""
        os.close(self._lock_fd)


class PageTiers:
    """The tiers of one rank's pool, fastest first; none if nothing was configured."""

    def __init__(self, pool: PageStore, tiers: Sequence[PageFiles]) -> None:
        self._pool = pool
        self.tiers = tiers
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-files")
        self._per_load = max(1, LOAD_BYTES // pool.page_bytes)

    def report_to(self, follower: KeyFollower) -> None:
        """Tell it which keys have files in the slowest tier, which has most."""
        self.tiers[-1].report_to(follower)

    def find(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys have files."""
        for tier in self.tiers:
            tier.look_for_others()
        return next((at for at, key in enumerate(keys) if not self.has(key)), len(keys))

    def has(self, key: bytes) -> bool:
        return any(tier.has(key) for tier in self.tiers)

    def touch(self, keys: Sequence[bytes]) -> None:
        for tier in self.tiers:
            tier.touch(keys)

    def save(self, entries: Sequence[NamedPage]) -> int:
        """Write pages to the tiers that lack them, where they still have their generation; returns how many had.

        Nothing holds the pages: like a peer's, a copy counts if the generation is the same after it.
        """
        num_saved = 0
        lacking = [entry for entry in entries if not all(tier.has(entry.key) for tier in self.tiers)]
        for begin in range(0, len(lacking), self._per_load):
            batch = lacking[begin : begin + self._per_load]
            pages = [entry.page for entry in batch]
            rows = self._pool.load(pages)
            for at in find_unchanged(batch, self._pool.generations[pages]):
                num_saved += 1
                for tier in self.tiers:
                    if not tier.has(batch[at].key):
                        tier.write(batch[at].key, rows[at], batch[at].has_draft)
        return num_saved

    def load(self, keys: Sequence[bytes], into: Sequence[int]) -> list[bool]:
        """Read files into pages that the caller holds, until one cannot be used; the content of the rest is undefined.

        Returns, for those read, whether they have the draft model's KV.
        """
        read: list[bool] = []
        for begin in range(0, len(keys), self._per_load):
            batch = keys[begin : begin + self._per_load]
            rows = np.empty((len(batch), self._pool.page_bytes), np.uint8)
            found = list(self._readers.map(self._read, batch, rows))
            num_good = next((at for at, one in enumerate(found) if one is None), len(batch))
            self._pool.store(into[begin : begin + num_good], list(rows[:num_good]))
            read += [bool(one) for one in found[:num_good]]
            if num_good < len(batch):
                break
        return read

    def _read(self, key: bytes, row: NDArray[np.uint8]) -> bool | None:
        found = (tier.read(key, row) for tier in self.tiers)
        return next((one for one in found if one is not None), None)

    def close(self) -> None:
        self._readers.shutdown()
        for tier in self.tiers:
            tier.close()


def find_unchanged(entries: Sequence[NamedPage], generations: Sequence[int] | NDArray[np.uint64]) -> list[int]:
    """Which of the entries' pages still have what they had: the others have had other holders. Pure."""
    return [at for at, entry in enumerate(entries) if generations[at] == entry.generation]


def identify(*facts: object) -> bytes:
    """The `pages_of` of a pool, from all that its pages depend on."""
    return blake2b(repr(facts).encode(), digest_size=16).digest()


LOCK = "owner"  # the file whose lock is held by a folder's owner


def _open_root(root: Path) -> int:
    """A descriptor of what all homes are in. Raises UnsafeFolderError, OSError.

    The one in memory is ours. The one that --kv-disk names is the user's: homes, the folders in it, are ours.
    """
    return open_private(root) if root == host_folder() else open_guarded(root)


@contextmanager
def _opened(parent: int, name: str) -> Iterator[int]:
    """A descriptor of a folder of ours that exists. Raises UnsafeFolderError, OSError."""
    fd = open_child(parent, name, Path(name), is_made=False)
    try:
        yield fd
    finally:
        os.close(fd)


def _name_store(home: int) -> str:
    """A name that follows from the random content of a home's file, whatever became of that."""
    with suppress(FileExistsError):
        new = os.open("id", os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN, 0o600, dir_fd=home)
        with os.fdopen(new, "wb") as file:
            file.write(secrets.token_bytes(16))
    with os.fdopen(os.open("id", os.O_RDONLY | OPEN, dir_fd=home), "rb") as file:
        return blake2b(file.read(), digest_size=8).hexdigest()


def _lock_one(home: int, path: Path) -> tuple[int, str]:
    """The first folder of this home that no process owns: the descriptor that holds its lock, and its name."""
    number = 0
    while True:
        os.close(open_child(home, str(number), path / str(number)))
        if (fd := _lock(home, str(number))) is not None:
            return fd, str(number)
        number += 1


def _lock(parent: int, folder: str) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None if a process has it."""
    path = f"{folder}/{LOCK}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | OPEN, 0o600, dir_fd=parent)
    with suppress(OSError):  # another has it, or has just removed the folder
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, dir_fd=parent, follow_symlinks=False)):
            return fd
    os.close(fd)
    return None


def host_folder() -> Path:
    """Folder of files in memory. They belong to no process, so a worker's next start finds them, too."""
    return Path(f"/dev/shm/baton-kv-{os.geteuid()}")


@contextmanager
def needing_files(root: Path) -> Iterator[None]:
    """Meanwhile files stay though no process owns them, as models sleep. The last of these contexts removes them."""
    fd = -1
    with suppress(OSError):  # what writes there says what is wrong
        fd = _open_root(root)
        fcntl.flock(fd, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)
        remove_unowned(root)


def remove_unowned(root: Path) -> None:
    """Remove all files that no process owns now, unless a service needs them. Leaves a root that others can write."""
    with suppress(OSError):
        fd = _open_root(root)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder, _ in _list_strangers(fd):
                _remove_unlocked(fd, folder)
        finally:
            os.close(fd)


def _list_owners(home: int) -> list[str]:
    """The names of the folders of a home: ours, and no links."""
    owners = []
    for name in os.listdir(home):
        with suppress(OSError), _opened(home, name):
            owners.append(name)
    return owners


def _list_strangers(root: int, own: str = "") -> list[tuple[str, int]]:
    """Folders that no process owns now, such as those of other models, and their bytes; least recently used first."""
    found = []
    for home in filter(_is_hex, os.listdir(root)):
        with suppress(OSError), _opened(root, home) as fd:
            for name in _list_owners(fd):
                if f"{home}/{name}" != own and _exists(fd, f"{name}/{LOCK}") and (lock := _lock(fd, name)) is not None:
                    os.close(lock)
                    with _opened(fd, name) as folder, os.scandir(folder) as entries:
                        size = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
                        found.append((os.fstat(folder).st_mtime_ns, f"{home}/{name}", size))
    return [(folder, size) for _, folder, size in sorted(found)]


def _remove_unlocked(root: int, folder: str) -> None:
    """Remove an owner's folder, unless a process owns it."""
    with suppress(OSError):
        if (lock := _lock(root, folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True, dir_fd=root)
            os.close(lock)


def _exists(parent: int, path: str) -> bool:
    return os.access(path, os.F_OK, dir_fd=parent)


def _sum(header: bytes | bytearray, row: NDArray[np.uint8]) -> int:
    """CRC-32 of all but the header's last field."""
    return zlib.crc32(row.data, zlib.crc32(header[:-4]))


def _is_hex(name: str) -> bool:
    """Whether it is the name of a home or a key: 16 bytes."""
    return len(name) == 32 and not set(name) - set("0123456789abcdef")
