"""Messages from one process to several, over a connection to each; they carry steps to ranks."""

import socket
from collections.abc import Sequence

SEND_BYTES = 1 << 22  # that the kernel holds for a follower, or as many as it allows: the masks of a few steps
LENGTH_BYTES = 8  # of a message
MAX_MESSAGE_BYTES = 1 << 32  # a step's images are the largest part


class LinkError(Exception):
    """The other side did not read or write in time, or is gone."""


def open_links(num_followers: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """The leader's ends, and the followers'. An end shows that the other is gone if no third process has that, too."""
    pairs = [socket.socketpair() for _ in range(num_followers)]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


class StepSender:
    """The writing end."""

    def __init__(self, ends: Sequence[socket.socket]) -> None:
        self._ends = ends
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)

    def write(self, message: bytes, timeout_s: float) -> None:
        """Write a message after its length. LinkError if a follower does not take it within `timeout_s`."""
        stream = len(message).to_bytes(LENGTH_BYTES, "little") + message
        for end in self._ends:
            end.settimeout(timeout_s)
            try:
                end.sendall(stream)
            except OSError as error:
                raise LinkError(f"a rank does not read its steps for {timeout_s:g} s: {error}") from error


class StepReceiver:
    """One of the reading ends."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def read(self, timeout_s: float | None = None) -> bytes:
        """The next message. LinkError if none comes within `timeout_s`; None: wait forever."""
        self._end.settimeout(timeout_s)
        try:
            length = int.from_bytes(take(self._end, LENGTH_BYTES), "little")
            if length > MAX_MESSAGE_BYTES:
                raise LinkError(f"a step of {length} bytes is too long")
            return take(self._end, length)
        except TimeoutError as error:
            waited = "rank 0 does not answer" if timeout_s is None else f"no step came for {timeout_s:g} s"
            raise LinkError(waited) from error


def take(end: socket.socket, size: int) -> bytes:
    """The next `size` bytes. Raises LinkError or OSError."""
    taken = bytearray(size)
    left = memoryview(taken)
    while left:
        if not (count := end.recv_into(left)):
            raise LinkError("the other process is gone")
        left = left[count:]
    return bytes(taken)
