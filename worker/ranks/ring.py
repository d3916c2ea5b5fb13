"""A byte stream from one process to several through shared memory; it carries steps to ranks.

    memory file:  a ring of bytes

Each follower has two eventfds: bytes that the leader wrote for it, and bytes that it read. Only through these does one
process learn what the other did: a system call on both sides, so that any CPU has stored the bytes before they count.
"""

import mmap
import os
import select
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RING_BYTES = 1 << 24
LENGTH_BYTES = 8  # of a message


class RingError(Exception):
    """The other side did not read or write in time, or is gone."""


def open_ring(num_followers: int, num_bytes: int = RING_BYTES) -> tuple[int, ...]:
    """File descriptors for processes to inherit, owned by the caller: memory, then two eventfds for each follower."""
    memory = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
    os.ftruncate(memory, num_bytes)
    return memory, *(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(2 * num_followers))


class _Ring:
    def __init__(self, fds: Sequence[int]) -> None:
        """fds: see `open_ring`."""
        memory, *events = fds
        self._written, self._read = events[::2], events[1::2]  # of each follower
        self._data: NDArray[np.uint8] = np.frombuffer(mmap.mmap(memory, 0), np.uint8)
        self._at = 0  # in the ring: where the next byte is

    def _pass(self, count: int) -> list[slice]:
        """The places of the next `count` bytes."""
        first, size = self._at, len(self._data)
        self._at = (first + count) % size
        end = first + count
        return [slice(first, end)] if end <= size else [slice(first, size), slice(0, end - size)]


class RingLeader(_Ring):
    """The writing end."""

    def __init__(self, fds: Sequence[int]) -> None:
        super().__init__(fds)
        self._rooms = [len(self._data)] * len(self._read)  # bytes that each follower leaves, as far as is known

    def write(self, message: bytes, timeout_s: float) -> None:
        """Write a message after its length. RingError if a follower leaves no room for `timeout_s`."""
        stream = np.frombuffer(len(message).to_bytes(LENGTH_BYTES, "little") + message, np.uint8)
        while len(stream):
            for number, room in enumerate(self._rooms):
                if not room:
                    self._rooms[number] = _wait(self._read[number], timeout_s, "a rank does not read its steps")
            count = min(len(stream), *self._rooms)
            for run in self._pass(count):
                self._data[run], stream = stream[: run.stop - run.start], stream[run.stop - run.start :]
            self._rooms = [room - count for room in self._rooms]
            for fd in self._written:
                os.eventfd_write(fd, count)


class RingFollower(_Ring):
    """One of the reading ends."""

    def __init__(self, fds: Sequence[int], number: int) -> None:
        super().__init__(fds)
        self._number = number
        self._available = 0  # bytes that were written and not read, as far as is known

    def read(self, timeout_s: float | None = None) -> bytes:
        """The next message. RingError if none comes within `timeout_s`; None: wait forever."""
        size = int.from_bytes(self._take(LENGTH_BYTES, timeout_s), "little")
        return self._take(size, timeout_s)

    def _take(self, size: int, timeout_s: float | None) -> bytes:
        parts: list[bytes] = []
        while size:
            self._available = self._available or _wait(self._written[self._number], timeout_s, "no step came")
            count = min(self._available, size)
            parts += [self._data[run].tobytes() for run in self._pass(count)]
            self._available, size = self._available - count, size - count
            os.eventfd_write(self._read[self._number], count)
        return b"".join(parts)


def _wait(fd: int, timeout_s: float | None, trouble: str) -> int:
    """Wait until the eventfd is written to; returns how much."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(None if timeout_s is None else timeout_s * 1000):
        raise RingError(f"{trouble} for {timeout_s:g} s")
    return os.eventfd_read(fd)
