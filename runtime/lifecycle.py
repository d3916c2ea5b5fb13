"""The start of a process, its reports to the process that started it, and its end.

loading* ready          JSON lines on an inherited pipe or socket, which closes when the process ends
serving ─SIGTERM, SIGINT or Drain─► draining ─nothing left, or drain_s over─► exit 0
                                        └─ another SIGTERM or SIGINT ─► ended by it, at once
"""

import asyncio
import atexit
import ctypes
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

import msgspec
import structlog

from runtime.events import Event, Loading, Ready, parse_event

log = structlog.get_logger()

FEW_OPEN_FILES = 1024  # a worker takes about 50 for itself, and then one a connection
MAX_OPEN_FILES = 1 << 20  # of no use beyond; systems may grant billions
TRIM_S = 5.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGE_BYTES = 1 << 20  # such blocks, and so much at the end of an arena, go back at once
LOADING_STEPS = 200  # most loading events, however small the steps of progress


class ReadyReporter:
    """The writing end. Without a file descriptor everything is a no-op."""

    def __init__(self, fd: int | None, role: str) -> None:
        self._fd = fd
        self._role = role
        self._reported = Loading(-1, 0)

    def loading(self, done: int, total: int, what: str = "weights") -> None:
        """Report progress, see `Loading`; cheap to call for every tensor."""
        last = self._reported.done if self._reported.what == what else -1
        if done == last or (done < total and done - last < total / LOADING_STEPS):
            return
        self._reported = Loading(done, total, what)
        self._write(self._reported)

    def ready(self, address: str, ops_address: str, incarnation: str, detail: Mapping[str, str]) -> None:
        """Report that this process takes requests."""
        self._write(Ready(self._role, address, ops_address, os.getpid(), incarnation, dict(detail)))

    def _write(self, event: Loading | Ready) -> None:
        if self._fd is None:
            return
        with suppress(ConnectionError):  # the reader is gone, which is not a reason to end
            os.write(self._fd, msgspec.json.encode(event) + b"\n")


class Link:
    """The same socket in both directions, of a gateway whose models can sleep; `baton serve` has the other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, event: Event) -> None:
        self._writer.write(msgspec.json.encode(event) + b"\n")

    async def read(self) -> AsyncIterator[Event]:
        """Events until the other end closes."""
        while line := await self._reader.readline():
            yield parse_event(line)


async def open_link(fd: int) -> Link:
    """`fd`: of a socket; stays open for `ReadyReporter`."""
    return Link(*await asyncio.open_unix_connection(sock=socket.socket(fileno=os.dup(fd))))


def spare_what_is_here() -> None:
    """Exclude all existing objects from later garbage collections, but for the one at the end. Call it after loading.

    A gateway then has 260,000 objects, which take 0.1 s to scan, and a worker a million. Libraries report those of
    their objects that the last collection leaves.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


async def return_freed_memory(every_s: float = TRIM_S) -> None:
    """Give freed memory back to the system from now on.

    Python collects cycles late where little is allocated: frames of a failed call hold its message. glibc keeps what
    lies between blocks in use and, after a large block was freed, up to twice its size at the end of each arena.
    Takes a hundredth of the event loop's time at most, and milliseconds of a thread.
    """
    libc = ctypes.CDLL(None)
    trim = getattr(libc, "malloc_trim", None)  # other libraries have none
    for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD) if trim is not None else ():
        libc.mallopt(threshold, LARGE_BYTES)
    while True:
        began_s = time.perf_counter()
        gc.collect()  # here, as objects of the event loop are not for other threads
        took_s = time.perf_counter() - began_s
        if trim is not None:
            await asyncio.to_thread(trim, 0)
        await asyncio.sleep(max(every_s, 100 * took_s))


def take_open_files() -> None:
    """Raise this process's limit of open files and connections as far as the system allows; warn when that is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if 0 <= soft < FEW_OPEN_FILES:
        log.warning(
            "few open files allowed", limit=soft, reason=f"each connection takes one; allow more: ulimit -n {1 << 16}"
        )


class Shutdown:
    """The end of a process that serves: it takes nothing new and finishes what it has, within `drain_s`.

    Lives on the asyncio thread, but for `look_soon`.
    """

    def __init__(self, drain_s: float, num_left: Callable[[], int]) -> None:
        """`num_left`: how many requests are running; `look_soon` is called when one ends."""
        self.drain_s = drain_s
        self._num_left = num_left
        self._loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self._is_idle = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self.begun.is_set()

    @property
    def num_left(self) -> int:
        return self._num_left()

    def listen(self) -> None:
        """From now on the first SIGTERM or SIGINT begins the drain; a second one ends us at once, as SIGTERM did."""
        self._end = signal.getsignal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(each)
            signal.signal(each, self._end)
        self.begin(number.name)

    def begin(self, cause: str) -> None:
        """Take nothing new. Idempotent."""
        if not self.is_draining:
            log.info("draining", cause=cause, left=self.num_left, drain_s=self.drain_s)
            self.begun.set()
            self._look()

    def look_soon(self) -> None:
        """A request has ended. From any thread."""
        self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self.is_draining and not self.num_left:
            self._is_idle.set()

    async def wait(self) -> None:
        """Wait until the drain has begun, and then until nothing is left or `drain_s` is over."""
        await self.begun.wait()
        try:
            async with asyncio.timeout(self.drain_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("not all work could be finished", left=self.num_left, drain_s=self.drain_s)
        else:
            log.info("drained")
