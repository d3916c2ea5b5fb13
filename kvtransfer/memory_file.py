"""A peer's memory file on this host: checked before it is opened, and mapped read-only."""

import fcntl
import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtransfer.reader import ReadError
from protos import kv_pb2

GENERATION_BYTES = 8


class PeerFile:
    """The generations of a peer's pages, and the pages if they are in main memory. All its ranks have the file open.

    The mapping stays valid after the peer's death and keeps its last content.
    """

    def __init__(self, peer: kv_pb2.Peer, page_bytes: int, rank: int = 0) -> None:
        """`page_bytes`: of each page in the file, over all ranks; 0 if it has no pages. `rank`: whose file to open.

        Raises ReadError("transport") if it cannot be opened, "layout" if it is not what was announced.
        """
        if not peer.num_pages:
            raise ReadError("layout", "a pool without pages")
        offset = peer.pages_offset
        if offset < peer.num_pages * GENERATION_BYTES:
            raise ReadError("layout", f"pages at byte {offset} leave no room for {peer.num_pages} generations")
        self._path = Path(f"/proc/{peer.ranks[rank].pid}/fd/{peer.pool_fd}")
        self.memory = _map_file(self._path, offset + peer.num_pages * page_bytes)
        self.generations: NDArray[np.uint64] = np.frombuffer(self.memory, np.uint64, peer.num_pages)
        self._identity = _identify(self._path)

    def is_held(self) -> bool:
        """Whether the peer still has this very file open. A dying process closes its files first.

        If so, its GPU memory is still there too. A process with the same pid, or an unreaped zombie, does not pass.
        """
        return self._identity is not None and _identify(self._path) == self._identity


def _identify(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _map_file(path: Path, expected_bytes: int) -> mmap.mmap:
    """Map the file that a peer announces: opened only if it is a plain file, mapped only if it is sealed memory."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe may block, opening a device may have effects
            raise ReadError("layout", f"{path} is not the memory file of a pool")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise ReadError("transport", f"cannot open the peer's pool {path}: {error.strerror}") from error
    try:
        if not _is_sealed(fd):
            raise ReadError("layout", f"{path} is not the memory file of a pool")
        size = os.fstat(fd).st_size
        if size != expected_bytes:
            raise ReadError("layout", f"the peer's pool has {size} bytes where {expected_bytes} were announced")
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _is_sealed(fd: int) -> bool:
    """Whether it is a memory file that cannot shrink: if it did, its readers would die of SIGBUS."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # files on disk have no seals
        return False
