"""A byte stream from one process to several through shared memory; it carries steps to ranks.

    memory file:  [ written | read by follower 0 | read by follower 1 | ... | data, a ring ]

Counters are bytes since the start and only grow. A follower waits on its own eventfd for data, the leader on its own
for room.
"""

import mmap
import os
import select
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RING_BYTES = 1 << 24
COUNTER_BYTES = 8


class RingError(Exception):
    """The other side did not read or write in time, or is gone."""


def open_ring(num_followers: int, num_bytes: int = RING_BYTES) -> tuple[int, ...]:
    """File descriptors for processes to inherit, owned by the caller: memory, each follower's eventfd, the leader's."""
    memory = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
    os.ftruncate(memory, (1 + num_followers) * COUNTER_BYTES + num_bytes)
    return memory, *(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(num_followers + 1))


class _Ring:
    def __init__(self, fds: Sequence[int]) -> None:
        """fds: see `open_ring`."""
        memory, *self._more, self._room = fds
        mapping, num_counters = mmap.mmap(memory, 0), 1 + len(self._more)
        self._counters: NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, num_counters)
        self._data: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8, offset=num_counters * COUNTER_BYTES)

    def _runs(self, begin: int, count: int) -> list[slice]:
        """The places of `count` bytes from the stream's `begin` on."""
        first, size = begin % len(self._data), len(self._data)
        end = first + count
        return [slice(first, end)] if end <= size else [slice(first, size), slice(0, end - size)]


class RingLeader(_Ring):
    """The writing end."""

    def write(self, message: bytes, timeout_s: float) -> None:
        """Write a message after its length. RingError if a follower leaves no room for `timeout_s`."""
        stream = np.frombuffer(len(message).to_bytes(COUNTER_BYTES, "little") + message, np.uint8)
        done = 0
        while done < len(stream):
            written, slowest = int(self._counters[0]), int(self._counters[1:].min())
            room = len(self._data) - (written - slowest)
            if not room:
                _wait(self._room, timeout_s, "a rank does not read its steps")
                continue
            part = stream[done : done + room]
            at = 0
            for run in self._runs(written, len(part)):
                self._data[run] = part[at : at + run.stop - run.start]
                at += run.stop - run.start
            self._counters[0] = written + len(part)  # after the bytes: x86 keeps that order, other CPUs may not
            done += len(part)
            for fd in self._more:
                os.eventfd_write(fd, 1)


class RingFollower(_Ring):
    """One of the reading ends."""

    def __init__(self, fds: Sequence[int], number: int) -> None:
        super().__init__(fds)
        self._number = number

    def read(self, timeout_s: float | None = None) -> bytes:
        """The next message. RingError if none comes within `timeout_s`; None: wait forever."""
        size = int.from_bytes(self._take(COUNTER_BYTES, timeout_s), "little")
        return self._take(size, timeout_s)

    def _take(self, count: int, timeout_s: float | None) -> bytes:
        parts: list[bytes] = []
        while count:
            read = int(self._counters[1 + self._number])
            available = min(int(self._counters[0]) - read, count)
            if not available:
                _wait(self._more[self._number], timeout_s, "no step came")
                continue
            parts += [self._data[run].tobytes() for run in self._runs(read, available)]
            self._counters[1 + self._number] = read + available
            os.eventfd_write(self._room, 1)
            count -= available
        return b"".join(parts)


def _wait(fd: int, timeout_s: float | None, trouble: str) -> None:
    """Wait until the eventfd is written to."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(None if timeout_s is None else timeout_s * 1000):
        raise RingError(f"{trouble} for {timeout_s:g} s")
    os.eventfd_read(fd)
