"""One process started by `baton serve`: its start, what it says, and its end.

Knows pipes, signals and process groups; not what the process is for.
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from cli.plan import ChildSpec
from runtime.events import Loading, Ready, parse_event

TAIL_LINES = 20
READ_BYTES = 1 << 16
LINE_LIMIT_BYTES = 1 << 20


class Child:
    """Owns a process, its process group and the two pipes it talks through: events and log lines."""

    def __init__(
        self, spec: ChildSpec, on_loading: Callable[[str, Loading], None], on_line: Callable[[str, str], None]
    ):
        """`on_loading` and `on_line` get the child's name and what it said."""
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)  # last log lines
        self._on_loading = on_loading
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pipes: list[asyncio.ReadTransport] = []
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._exited = asyncio.Event()
        self._ready_at = self._exited_at = 0.0  # loop time

    async def start(self) -> None:
        """Start the process in a group of its own, so that a terminal's Ctrl-C reaches only the supervisor."""
        events, events_end = os.pipe()
        log, log_end = os.pipe()  # ours, because asyncio's own would tie the process's end to whoever holds it open
        try:
            talking = [self._read_events(await self._open_reader(events)), self._read_log(await self._open_reader(log))]
            self._tasks = [asyncio.create_task(reading) for reading in talking]
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                f"--ready-fd={events_end}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_end,
                stderr=log_end,
                pass_fds=(events_end,),
                process_group=0,
                env={**_inherited_environment(), **self.spec.environment},
            )
        finally:
            os.close(events_end)
            os.close(log_end)
        self._tasks.append(asyncio.create_task(self._reap(self._process)))

    async def wait_ready(self) -> Ready | None:
        """What the process reports when it takes requests; None when it ended before that."""
        exited = asyncio.create_task(self._exited.wait())
        await asyncio.wait((self._ready, exited), return_when=asyncio.FIRST_COMPLETED)
        exited.cancel()
        return self._ready.result() if self._ready.done() else None

    async def wait_exited(self) -> int:
        """The exit status; negative for a signal."""
        await self._exited.wait()
        assert self._process is not None and self._process.returncode is not None
        return self._process.returncode

    @property
    def is_running(self) -> bool:
        """True from start to end of the process."""
        return self._process is not None and not self._exited.is_set()

    @property
    def is_ready(self) -> bool:
        """True once the process has reported that it takes requests."""
        return self._ready.done()

    @property
    def served_s(self) -> float:
        """How long a process that has ended took requests; 0 when it never did."""
        return self._exited_at - self._ready_at if self.is_ready else 0.0

    def terminate(self) -> None:
        """Ask the process to end."""
        if self._process is not None and self.is_running:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process and everything it started, at once."""
        if self._process is not None and self.is_running:
            _kill_group(self._process.pid)

    async def close(self) -> None:
        """Stop listening. The process has ended, or is given up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pipe in self._pipes:
            pipe.close()

    async def _open_reader(self, fd: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        pipe, _protocol = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
        )
        self._pipes.append(pipe)
        return reader

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        _kill_group(process.pid)  # what it may have started; the group's id is free for others only when it is empty
        self._exited_at = asyncio.get_running_loop().time()
        await asyncio.wait(self._tasks[:2], timeout=1.0)  # its last words
        self._exited.set()

    async def _read_events(self, reader: asyncio.StreamReader) -> None:
        async for line in _iterate_lines(reader):
            try:
                event = parse_event(line)
            except ValueError as error:
                self._say(f"ignored: {error}")
                continue
            if isinstance(event, Loading):
                self._on_loading(self.spec.name, event)
            elif not self._ready.done():
                self._ready_at = asyncio.get_running_loop().time()
                self._ready.set_result(event)

    async def _read_log(self, reader: asyncio.StreamReader) -> None:
        async for line in _iterate_lines(reader):
            self._say(line)

    def _say(self, line: str) -> None:
        self.tail.append(line)
        self._on_line(self.spec.name, line)


def _inherited_environment() -> dict[str, str]:
    # A child has its settings on its command line: BATON_PORT, say, means the service's port and not a worker's.
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody left; on some systems only zombies
        os.killpg(group, signal.SIGKILL)


async def _iterate_lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines without their ends; one that is too long comes in pieces."""
    rest = b""
    while data := await reader.read(READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        if len(rest) > LINE_LIMIT_BYTES:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")
