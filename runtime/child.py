"""Child processes: each dies with its parent and is reaped, and those that answer calls do so over a socket pair.

    parent ── [number, call] ──► child ── [number, answer] ──► parent     in any order, one answer a call
    parent ── [number, nil] ──► child ── [number, nil] ──► parent         the call is cancelled

A message is 4 bytes of length, then msgpack. The end of the stream means that the other process has ended, or asks this
one to end. Call 0 is sent at the start; its answer says that the child is ready. A child can do hostile work in a
`Fork` of its own, within limits (fork.py).
"""

import asyncio
import ctypes
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
import structlog

PR_SET_PDEATHSIG = 1
LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 28
ROOT = Path(__file__).resolve().parents[1]  # of our packages
END_S = 5.0  # that a child has to end when its stream has

AnswerT = TypeVar("AnswerT")
CallT = TypeVar("CallT")
log = structlog.get_logger()


class ChildError(Exception):
    """The child does not answer and is killed. The message says what it did: "ended with signal SIGKILL"."""


class ChildProcess:
    """A running process, with a group of its own if it may start others."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        fds: Sequence[int],
        output: int | None = None,
        has_group: bool = False,
    ) -> None:
        """Start it. It dies with the calling thread once it has called `follow_parent`. Raises OSError.

        fds: inherited. output: for its stdout and stderr; None: ours. has_group: a terminal's Ctrl-C does not reach it,
        and what it started is killed when it ends.
        """
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=fds,
            env=with_our_packages(environment), process_group=0 if has_group else None,
        )  # fmt: skip
        self.pid = self._popen.pid
        self._has_group = has_group
        self.ended: Future[int] = Future()  # its exit status, negative for a signal; set when it is reaped
        self.ended.set_running_or_notify_cancel()  # so that no cancelled `wait` cancels it
        threading.Thread(target=self._reap, name="child", daemon=True).start()

    def _reap(self) -> None:
        code = self._popen.wait()
        if self._has_group:
            self.kill()  # until its members end, the group's id is not used again
        self.ended.set_result(code)

    async def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its exit status. Raises TimeoutError."""
        return await asyncio.wait_for(asyncio.wrap_future(self.ended), timeout_s)

    def terminate(self) -> None:
        """Ask it to end."""
        self._popen.terminate()

    def kill(self) -> None:
        """End it, and its group."""
        if self._has_group:
            with suppress(ProcessLookupError, PermissionError):  # none is left; on some systems only zombies are
                os.killpg(self.pid, signal.SIGKILL)
        else:
            self._popen.kill()


def with_our_packages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Python process that imports `cli` and `runtime` from here, whatever else has these names."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


class Answerer(Generic[AnswerT]):
    """A process that answers calls over a socket. Its methods run on the asyncio thread."""

    ended: Future[int]

    def __init__(self, sock: socket.socket, start: msgspec.Struct, answers: Any) -> None:
        """Send call 0, `start`; needs no event loop. answers: the type of all answers."""
        self._decoder = msgspec.msgpack.Decoder(tuple[int, answers | None])
        self._sock = sock
        self._sock.sendall(pack((0, start)))
        self._writer: asyncio.StreamWriter | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[AnswerT]] = {}
        self.trouble = ""  # why it answers no more

    async def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end. Raises TimeoutError."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it, or the connection to it."""
        raise NotImplementedError

    async def wait_ready(self, timeout_s: float) -> AnswerT:
        """The answer to `start`. Raises ChildError like `ask`."""
        reader, self._writer = await open_stream(self._sock)
        self._receiving = asyncio.create_task(self._receive(reader))
        return await self._wait_answer(0, timeout_s)

    async def ask(self, call: msgspec.Struct, timeout_s: float) -> AnswerT:
        """Send a call and return its answer. Raises ChildError if there is none in time: the child is killed.

        The child stops its work on a call that is cancelled here.
        """
        if self.trouble:
            raise ChildError(self.trouble)
        assert self._writer is not None
        number = next(self._numbers)
        self._writer.write(pack((number, call)))
        return await self._wait_answer(number, timeout_s)

    async def _wait_answer(self, number: int, timeout_s: float) -> AnswerT:
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self.fail(f"did not answer within {timeout_s:g} s")
            raise ChildError(self.trouble) from None
        except asyncio.CancelledError:
            if self._writer is not None and not self.trouble:
                self._writer.write(pack((number, None)))
            raise

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, answer = self._decoder.decode(await receive(reader))
                waiting = self._calls.pop(number)
                if answer is not None and not waiting.done():
                    waiting.set_result(answer)
        except (EOFError, OSError):
            try:
                self.fail(f"ended with {describe_exit(await self.wait(END_S))}")
            except TimeoutError:
                self.fail("hung up")
        except (ValueError, KeyError) as error:
            self.fail(f"sent what is no answer ({error})")

    @property
    def is_answering(self) -> bool:
        """False once a call has failed or would fail."""
        return not self.trouble and not self.ended.done()

    def fail(self, trouble: str) -> None:
        """Kill it and end all calls with ChildError, which says `trouble`."""
        self.trouble = self.trouble or trouble
        self.kill()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ChildError(self.trouble))
        self._calls.clear()

    async def close(self, timeout_s: float = END_S) -> None:
        """Hang up, which asks it to end, and kill it after `timeout_s`. Running calls end with ChildError."""
        self.trouble = self.trouble or "was stopped"
        (self._writer or self._sock).close()
        with suppress(TimeoutError):
            await self.wait(timeout_s)
        if self._receiving is not None:
            self._receiving.cancel()
        self.fail(self.trouble)
        with suppress(TimeoutError):
            await self.wait(END_S)


class ChildServer(ChildProcess, Answerer[AnswerT]):
    """A child that answers calls."""

    def __init__(
        self,
        module: str,
        start: msgspec.Struct,
        answers: Any,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `python -m module FD FDS...`: see `Answerer`. environment: added to ours."""
        ours, theirs = socket.socketpair()
        with theirs:
            passed = (theirs.fileno(), *fds)
            command = [sys.executable, "-P", "-m", module, *map(str, passed)]
            ChildProcess.__init__(self, command, {**os.environ, **(environment or {})}, passed)
        Answerer.__init__(self, ours, start, answers)


class StandingChild(Generic[AnswerT]):
    """A child that is started when it is needed, and replaced when it has failed. On the asyncio thread."""

    def __init__(self, start: Callable[[], ChildServer[AnswerT]], start_s: float) -> None:
        """`start_s`: the longest that it may take to be ready."""
        self._start = start
        self._start_s = start_s
        self.child: ChildServer[AnswerT] | None = None
        self._starting: asyncio.Task[AnswerT] | None = None  # the last start, shared by all callers that wait
        self._is_closed = False

    async def ready(self) -> AnswerT:
        """Start it if needed; its answer to the first call. Raises ChildError if it does not start."""
        starting = self._starting
        if starting is None or (starting.done() and not (self.child is not None and self.child.is_answering)):
            starting = self._starting = asyncio.create_task(self._replace())
            starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps no caller waits
        return await asyncio.shield(starting)

    async def _replace(self) -> AnswerT:
        if self.child is not None:
            await self.child.close()
        if self._is_closed:
            raise ChildError("was stopped")
        try:
            self.child = self._start()
        except OSError as error:
            raise ChildError(f"cannot be started: {error}") from error
        return await self.child.wait_ready(self._start_s)

    async def ask(self, call: msgspec.Struct, timeout_s: float) -> AnswerT:
        """As `ChildServer.ask`."""
        await self.ready()
        assert self.child is not None
        return await self.child.ask(call, timeout_s)

    async def ask_twice(self, call: msgspec.Struct, timeout_s: float, what: str) -> AnswerT:
        """As `ask`, and again if it fails, which is logged: it may have been killed. `what`: its name in the log."""
        for is_last in (False, True):
            try:
                return await self.ask(call, timeout_s)
            except ChildError as error:
                log.warning(f"{what} fails", error=str(error))
                if is_last:
                    raise
        raise AssertionError

    async def close(self) -> None:
        """Kill it, for good. Running calls end with ChildError."""
        self._is_closed = True
        if self.child is not None:
            await self.child.close(timeout_s=0.0)


async def serve_parent(fd: int, calls: Any, work: Callable[[CallT], Coroutine[Any, Any, object]]) -> NoReturn:
    """In a child: answer calls, in parallel, until the parent hangs up, which ends this process at once.

    fd: the first that `ChildServer` gave. calls: the type of all calls. `work` is cancelled with its call; its
    exceptions end this process.
    """
    follow_parent(fd)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is for the parent
        signal.signal(ignored, signal.SIG_IGN)
    decoder = msgspec.msgpack.Decoder(tuple[int, calls | None])
    reader, writer = await open_stream(socket.socket(fileno=fd))
    running: dict[int, asyncio.Task[object]] = {}

    def answer(number: int, done: asyncio.Task[object]) -> None:
        del running[number]
        if done.cancelled() or done.exception() is None:
            writer.write(pack((number, None if done.cancelled() else done.result())))

    async with asyncio.TaskGroup() as group:
        while True:
            try:
                data = await receive(reader)
            except (EOFError, OSError):
                os._exit(0)
            number, call = decoder.decode(data)
            if call is not None:
                running[number] = group.create_task(work(call))
                running[number].add_done_callback(partial(answer, number))
            elif number in running:
                running[number].cancel()


async def open_stream(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens streams on a connected socket."""
    is_local = sock.family is socket.AF_UNIX
    return await (asyncio.open_unix_connection if is_local else asyncio.open_connection)(sock=sock)


def frame(data: bytes) -> bytes:
    """A message of these bytes: after their length."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def pack(message: object) -> bytes:
    """A message after its length."""
    return frame(msgspec.msgpack.encode(message))


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The next message, without its length. Raises EOFError, or ValueError if it is too long."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes is too long")
    return await reader.readexactly(length)


def follow_parent(fd: int | None) -> None:
    """End when the process that started this one ends, for any reason: the kernel watches the thread that did.

    fd: of a pipe or socket whose other end only the parent holds; processes started here do not inherit it. No-op
    without one. Call it first.
    """
    if fd is None:
        return
    os.set_inheritable(fd, False)
    die_with_parent()
    poller = select.poll()
    poller.register(fd, 0)
    if any(flags & (select.POLLERR | select.POLLHUP) for _fd, flags in poller.poll(0)):
        sys.exit(1)  # the parent ended before we asked the kernel


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends. No-op off Linux."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
