"""The memory below a pool: files of the host's, and what is asked of a device whose memory is another."""

import os
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class Landing(Protocol):
    """Pages beside a pool, in its own kind of memory: kvtransfer's Landing."""

    @property
    def address(self) -> int: ...

    def copy(self, pages: Sequence[int], into: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class PeerPages(Landing, Protocol):
    """Another process's pool: kvtransfer's PeerPages."""

    def copy(
        self, pages: Sequence[int], into: Sequence[int], source: int = 0, target: int = 0, num_bytes: int | None = None
    ) -> None: ...

    def probe(self, num_pages: int, source: int, num_bytes: int) -> None: ...

    def load(self, begin: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]: ...


def create_file() -> int:
    """The file descriptor of an empty memory file. Raises OSError."""
    return os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
