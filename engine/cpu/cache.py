"""Memory for packed weights: a cache file that all workers of a host map, or this process's own memory.

The first process that needs a file writes it once and renames it when it is complete. The name depends on everything in
it, so a file never changes. Writing a file removes files that were not opened for a month, and parts of files whose
writer was killed.
"""

import json
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from engine.weights.folders import CannotShareError, locked

Fill = Callable[[Tensor], object]  # writes into zeroed memory, [num_bytes] uint8

ALIGNED_BYTES = 1 << 16  # tensors begin at multiples of it: page-aligned on any system
PADDING_BYTES = 8192  # after each tensor: kernels prefetch past the end
UNUSED_S = 30 * 86_400
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
END_MAGIC = b"BATONWTS"


class Weights:
    """Gives each packed tensor its memory: in this process."""

    def take(self, name: str, num_bytes: int, fill: Fill) -> Tensor:
        """The tensor `name`, [num_bytes or more] uint8, filled by `fill` unless it already is."""
        memory = torch.zeros(num_bytes + PADDING_BYTES + 64, dtype=torch.uint8)
        tensor = memory[-memory.data_ptr() % 64 :][: num_bytes + PADDING_BYTES]
        fill(tensor[:num_bytes])
        return tensor

    def find(self, begin: str) -> str | None:
        """The name that begins so, of a tensor that is filled."""
        return None


class WrittenWeights(Weights):
    """In a file being written. A tensor is valid until the next `take`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._index: dict[str, tuple[int, int]] = {}  # name |-> begin, bytes
        self._end = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def take(self, name: str, num_bytes: int, fill: Fill) -> Tensor:
        length = _round_up(num_bytes + PADDING_BYTES)
        if length > len(self._scratch):
            self._scratch = torch.empty(length, dtype=torch.uint8)  # torch aligns to 64 bytes
        tensor = self._scratch[:length].zero_()
        fill(tensor[:num_bytes])
        self._index[name] = self._end, num_bytes
        self._file.write(tensor.numpy().data)
        self._end += length
        return tensor

    def finish(self) -> None:
        """Write the index and its length at the end."""
        index = json.dumps(self._index).encode()
        self._file.write(index + len(index).to_bytes(8, "little") + END_MAGIC)
        self._file.flush()
        os.fsync(self._file.fileno())
        with suppress(AttributeError):  # Linux only
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # a new read gets huge pages


class MappedWeights(Weights):
    """In a complete file; all processes that map it share its pages."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if the file is damaged, OSError if it cannot be read."""
        with path.open("rb") as file:
            self._index = _read_index(file)
            self._mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self.num_bytes = len(self._mapped)
        with suppress(OSError, AttributeError):  # not on every system
            self._mapped.madvise(mmap.MADV_HUGEPAGE)  # 2 to 4 % of a step on ext4, which has huge pages
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to it
            self._all = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def take(self, name: str, num_bytes: int, fill: Fill) -> Tensor:
        """See `Weights`. ValueError if the file does not have it."""
        begin, stored = self._index.get(name, (0, -1))
        if stored != num_bytes:
            raise ValueError(f"{name} has {stored} bytes in the cache file, expected {num_bytes}")
        length = _round_up(num_bytes + PADDING_BYTES)
        try:
            self._mapped.madvise(POPULATE_READ, begin, length)  # reads it now rather than in the first request
        except OSError:
            self._all[begin : begin + length : mmap.PAGESIZE].sum()
        return self._all[begin : begin + length]

    def find(self, begin: str) -> str | None:
        return next((name for name in self._index if name.startswith(begin)), None)


def _read_index(file: BinaryIO) -> dict[str, tuple[int, int]]:
    try:
        end = file.seek(-16, os.SEEK_END)
        length, magic = int.from_bytes(file.read(8), "little"), file.read(8)
        if magic != END_MAGIC or length > end:
            raise ValueError("it is incomplete")
        file.seek(end - length)
        index = {name: (int(begin), int(size)) for name, (begin, size) in json.loads(file.read(length)).items()}
        ends = [begin + _round_up(size + PADDING_BYTES) for begin, size in index.values() if min(begin, size) >= 0]
        if len(ends) < len(index) or max(ends) != end - length:
            raise ValueError("its index does not fit")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.name} is not a file of packed weights: {error}") from error
    return index


def share_weights(folder: Path, name: str, num_bytes: int, pack: Callable[[Weights], object]) -> MappedWeights:
    """The file `name` of `folder`; if it is missing, `pack` writes it, at most about `num_bytes`.

    One process packs at a time; others wait. CannotShareError if the file cannot be written.
    """
    path = folder / f"{name}.weights"
    try:
        with locked(folder / f"{name}.lock"):
            found = _open(path)
            if found is None:
                path.with_suffix(".part").unlink(missing_ok=True)
                _remove_unused(folder)
                _check_room(folder, num_bytes)
                _write(path, pack)
                found = MappedWeights(path)
            os.utime(path)
    except OSError as error:
        raise CannotShareError(f"packed weights cannot be kept in {folder}: {error}") from error
    return found


def _open(path: Path) -> MappedWeights | None:
    try:
        return MappedWeights(path) if path.exists() else None
    except ValueError:
        path.unlink()
        return None


def _write(path: Path, pack: Callable[[Weights], object]) -> None:
    draft = path.with_suffix(".part")  # only the holder of the lock writes it
    try:
        with draft.open("w+b") as file:
            weights = WrittenWeights(file)
            pack(weights)
            weights.finish()
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes * 1.1:
        raise CannotShareError(
            f"packed weights need {num_bytes >> 20} MiB in {folder}, which has {free >> 20} MiB free: "
            "set XDG_CACHE_HOME to a folder with more, or each worker keeps its own copy in memory"
        )


def _remove_unused(folder: Path) -> None:
    for path in (*folder.glob("*.weights"), *folder.glob("*.digests")):
        if path.stat().st_mtime < time.time() - UNUSED_S:
            path.unlink(missing_ok=True)
    for path in folder.glob("*.part"):
        with suppress(CannotShareError), locked(path.with_suffix(".lock"), 0.0):  # else it is being written
            path.unlink(missing_ok=True)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
