"""Pages of one rank's pool as files: a tier below the pool, on a disk or in memory (/dev/shm). A slot is a page, too.

    DIR / what the pages are: model, format, ranks / number of the owner / key        one file a page

Each process owns one folder, which it locks: only there it writes and evicts, so its files are bounded. It reads those
of the other owners, too. A file is whole or it is not used: its checksum covers what it is of as well as its bytes, so
a torn, changed or foreign file is a miss.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import EPERM
from hashlib import blake2b
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from kvtransfer.reader import PageStore
from wire.page_keys import NamedPage

MAGIC = b"BATONKV1"  # a change of the format is another number
HEADER = struct.Struct(
    "<8s16s16sII"
)  # magic, what the pages are, key, whether draft KV is complete, CRC-32 of all else
LOAD_BYTES = 16 << 20  # pages loaded or saved at once
NUM_READERS = 4  # threads: one checks 2 GB/s
PAUSE_S = 60.0  # between attempts to write, after one failed, and between warnings about bad files
log = structlog.get_logger()


class PageFiles:
    """One folder of files. Calls may come from several threads; they take milliseconds to seconds."""

    def __init__(self, root: Path, pages_of: bytes, max_bytes: int) -> None:
        """`pages_of`: 16 bytes that are equal for pools whose pages are alike. Raises OSError."""
        self._pages_of = pages_of
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards what follows
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # key |-> bytes of its file; next to evict first
        self.num_bytes = 0
        self._paused_until = 0.0  # no writes before
        self._silent_until = 0.0  # no warnings about bad files before
        self.num_bad = 0  # files that could not be used
        home = root / pages_of.hex()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.mkdir(mode=0o700, exist_ok=True)
        if (owner := home.stat().st_uid) != os.geteuid():
            raise PermissionError(EPERM, f"it belongs to user {owner}, who could write wrong KV there")
        self.store = _name_store(home / "id")  # equal for all owners of this home
        self._fd, self.folder = _lock_one(home)
        self._others: list[Path] = []
        self.look_for_others()
        self._strangers = _list_strangers(root, self.folder)
        self._read_folder()
        if (room := shutil.disk_usage(root).free + self.num_bytes) < max_bytes:
            log.warning("less room for KV than allowed", folder=str(root), mib=room >> 20, allowed_mib=max_bytes >> 20)

    def _read_folder(self) -> None:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                key = bytes.fromhex(entry.name) if len(entry.name) == 32 and _is_hex(entry.name) else b""
                if key:
                    stat = entry.stat()
                    found.append((stat.st_mtime_ns, key, stat.st_size))
                elif entry.name != LOCK:
                    Path(entry.path).unlink()  # one that was being written
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self.num_bytes += size
        self._evict()

    def look_for_others(self) -> None:
        """Read from folders of owners that came after this one, too."""
        with os.scandir(self.folder.parent) as entries:
            self._others = [Path(entry.path) for entry in entries if entry.is_dir() and Path(entry.path) != self.folder]

    @property
    def num_files(self) -> int:
        return len(self._sizes)

    def has(self, key: bytes) -> bool:
        """Whether a file is there; perhaps it cannot be used."""
        return key in self._sizes or any((other / key.hex()).exists() for other in self._others)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were useful now. The first becomes the youngest: the others are of no use without it."""
        with self._lock:
            for key in reversed(keys):
                if key in self._sizes:
                    self._sizes.move_to_end(key)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, key: bytes, row: NDArray[np.uint8]) -> bool | None:
        """Fill `row`; returns whether it has the draft model's KV. None: there is no such file that can be used."""
        for folder in (self.folder, *self._others):
            path, header = folder / key.hex(), bytearray(HEADER.size)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
                self._drop_bad(key, path, f"{num_read} bytes, or what they are of, or their checksum")
            except OSError as error:
                self._drop_bad(key, path, str(error))
            finally:
                os.close(fd)
        return None

    def _drop_bad(self, key: bytes, path: Path, reason: str) -> None:
        self.num_bad += 1
        if (now := time.monotonic()) >= self._silent_until:
            self._silent_until = now + PAUSE_S
            log.warning(
                "a KV file cannot be used: counts as missing", path=str(path), wrong=reason, so_far=self.num_bad
            )
        if path.parent == self.folder:
            self._drop(key)

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, key: bytes, row: NDArray[np.uint8], has_draft: bool) -> None:
        """Save a page. Nothing happens, apart from a warning, where that is not possible now."""
        size = HEADER.size + len(row)
        if time.monotonic() < self._paused_until or size > self._max_bytes:
            return
        fields = HEADER.pack(MAGIC, self._pages_of, key, has_draft, 0)
        header = HEADER.pack(MAGIC, self._pages_of, key, has_draft, _sum(fields, row))
        path = self.folder / key.hex()
        new = path.with_suffix(".new")
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                num_written = os.writev(fd, [header, row.data])
                while num_written < size:
                    num_written += os.pwrite(fd, row.data[num_written - HEADER.size :], num_written)
            finally:
                os.close(fd)
            new.replace(path)
        except OSError as error:
            self._paused_until = time.monotonic() + PAUSE_S
            log.warning(
                "KV cannot be saved; serving goes on without, and this is tried again", folder=str(self.folder),
                reason=str(error), seconds=PAUSE_S,
            )  # fmt: skip
            with suppress(OSError):
                new.unlink()
            return
        with self._lock:
            self.num_bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size
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
                _remove_unlocked(stranger)
            else:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        with self._lock:
            self.num_bytes -= self._sizes.pop(key, 0)
        with suppress(OSError):
            (self.folder / key.hex()).unlink()

    def close(self) -> None:
        """Another process may own the folder from now on."""
        os.close(self._fd)


class PageTiers:
    """The tiers of one rank's pool, fastest first; none if nothing was configured."""

    def __init__(self, pool: PageStore, tiers: Sequence[PageFiles]) -> None:
        self._pool = pool
        self.tiers = tiers
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-files")
        self._per_load = max(1, LOAD_BYTES // pool.page_bytes)

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


def _name_store(path: Path) -> str:
    """A name that follows from the file's random content, whatever became of that."""
    with suppress(FileExistsError), path.open("xb") as file:
        file.write(secrets.token_bytes(16))
    return blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _lock_one(home: Path) -> tuple[int, Path]:
    """The first folder of this home that no process owns, and the descriptor that holds its lock."""
    number = 0
    while True:
        folder = home / str(number)
        folder.mkdir(mode=0o700, exist_ok=True)
        if (fd := _lock(folder)) is not None:
            return fd, folder
        number += 1


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None if a process has it."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # another has it, or has just removed the folder
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), (folder / LOCK).stat()):
            return fd
    os.close(fd)
    return None


def host_folder() -> Path:
    """Of files in memory: as they belong to no process, they are there for the worker's next start, too."""
    return Path(f"/dev/shm/baton-kv-{os.geteuid()}")


def remove_unowned(root: Path) -> None:
    """Remove all files that no process owns now."""
    for folder, _ in _list_strangers(root, root):
        _remove_unlocked(folder)


def _list_strangers(root: Path, own: Path) -> list[tuple[Path, int]]:
    """Folders that no process owns now, such as those of other models, and their bytes; least recently used first."""
    found = []
    for folder in root.glob("*/*"):
        if folder != own and (folder / LOCK).exists() and (fd := _lock(folder)) is not None:
            sizes = [entry.stat().st_size for entry in os.scandir(folder)]
            found.append((folder.stat().st_mtime_ns, folder, sum(sizes)))
            os.close(fd)
    return [(folder, size) for _, folder, size in sorted(found)]


def _remove_unlocked(folder: Path) -> None:
    """Remove an owner's folder, unless a process owns it."""
    with suppress(OSError):
        if (fd := _lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


def _sum(header: bytes | bytearray, row: NDArray[np.uint8]) -> int:
    """CRC-32 of all but the header's last field."""
    return zlib.crc32(row.data, zlib.crc32(header[:-4]))


def _is_hex(name: str) -> bool:
    return not set(name) - set("0123456789abcdef")
