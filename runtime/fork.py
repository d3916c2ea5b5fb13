"""Forks that do hostile work within limits of time and memory, for children and at a start."""

import asyncio
import faulthandler
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from runtime.child import LENGTH_BYTES, die_with_parent, frame, pack, receive


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call's work."""

    cpu_s: float
    wall_s: float
    memory_bytes: int  # of address space, beyond what the process has


Trouble = Literal["busy", "slow", "crashed"]  # the wall time is over, the CPU time is, or it ended otherwise


class Refused(msgspec.Struct, tag=True):
    """An answer of a child: why there is no result, in words for the client: "it is damaged"."""

    message: str
    param: str = ""  # the part of the call that is wrong, where the child knows it


class Busy(msgspec.Struct, tag=True):
    """An answer of a child: the work took longer than its wall time."""


def as_answer(found: msgspec.Raw | Trouble, *, slow: str, crashed: str) -> msgspec.Raw | Refused | Busy:
    """A child's answer, from what its fork found. `slow`, `crashed`: the message of Refused in these cases."""
    match found:
        case "busy":
            return Busy()
        case "slow":
            return Refused(slow)
        case "crashed":
            return Refused(crashed)
    return found


class Fork:
    """A fork of this process that answers calls, each within limits: whatever a hostile input does to it ends there.

    This process should have no other thread: what such a one holds is held for ever in the fork.
    """

    def __init__(self, limits: Limits, work: Callable[[bytes], object], fd: int | None = None) -> None:
        """Starts it. fd: of the calls that this process serves itself, which the fork closes. Raises OSError."""
        self._limits = limits
        self._ours, theirs = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            try:
                self._ours.close()
                if fd is not None:
                    os.close(fd)
                die_with_parent()
                if os.getppid() == parent:
                    _answer_in_fork(theirs, limits, work)
            finally:
                os._exit(0)
        theirs.close()

    async def ask(self, call: bytes = b"") -> msgspec.Raw | Trouble:
        """The packed result of `work`. The fork has ended when there is none, or this is cancelled. One at a time."""
        is_answered = False
        try:
            async with asyncio.timeout(self._limits.wall_s):
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(sock=self._ours)
                reader, writer = self._streams
                writer.write(frame(call))
                answer = await receive(reader)
            is_answered = True
            return msgspec.Raw(answer)
        except TimeoutError:
            return "busy"
        except (EOFError, ConnectionError, ValueError):
            return _explain(self.end())
        finally:
            if not is_answered:
                self.end()

    def ask_now(self, call: bytes = b"") -> msgspec.Raw | Trouble:
        """As `ask`, without an event loop."""
        self._ours.settimeout(self._limits.wall_s)
        try:
            self._ours.sendall(frame(call))
            with self._ours.makefile("rb") as stream:
                if (answer := _read_frame(stream)) is not None:
                    return msgspec.Raw(answer)
        except TimeoutError:
            self.end()
            return "busy"
        except OSError:
            pass
        return _explain(self.end())

    def end(self) -> int:
        """Kill it. Returns what waitpid says of it; 0 if it has ended before. Idempotent."""
        if self.pid == 0:
            return 0
        pid, self.pid = self.pid, 0
        if self._streams is None:
            self._ours.close()
        else:
            self._streams[1].transport.abort()
        os.kill(pid, signal.SIGKILL)  # not reaped yet: the number is still its
        return os.waitpid(pid, 0)[1]


async def work_in_fork(fd: int, limits: Limits, work: Callable[[], object]) -> msgspec.Raw | Trouble:
    """The packed result of `work`, done by a fork of its own. fd: as in `Fork`."""
    fork = Fork(limits, lambda _: work(), fd)
    try:
        return await fork.ask()
    finally:
        fork.end()


def _explain(status: int) -> Trouble:
    return "slow" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF else "crashed"


def _answer_in_fork(sock: socket.socket, limits: Limits, work: Callable[[bytes], object]) -> None:
    _limit_myself(limits)
    with sock.makefile("rb") as calls:
        while (call := _read_frame(calls)) is not None:
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # of CPU time; the signal ends this process
            answer = pack(work(call))
            signal.setitimer(signal.ITIMER_PROF, 0)
            sock.sendall(answer)


def _limit_myself(limits: Limits) -> None:
    faulthandler.disable()  # crashes are expected
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # warnings of libraries quote the client's text
    os.dup2(nowhere, 1)


def _read_frame(stream: BinaryIO) -> bytes | None:
    """The next message of a blocking stream; None at its end."""
    length = stream.read(LENGTH_BYTES)
    data = stream.read(int.from_bytes(length, "little"))
    return data if len(length) == LENGTH_BYTES and len(data) == int.from_bytes(length, "little") else None
