"""One process that `baton serve` starts: its start, its two pipes (events and log lines), and its end.

Knows pipes, signals and process groups; not what the process is for.
"""

import asyncio
import io
import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress

from cli.plan import ProcessSpec
from cli.screen import Screen
from runtime.events import Loading, Ready, parse_event
from runtime.hardware import CPU_ISA

READ_BYTES = 1 << 16
LINE_LIMIT_BYTES = 1 << 20
LAST_LINES_S = 1.0  # in which the pipes of an ended process are read to their end


class Process:
    """Owns a running process, its process group and its pipes."""

    def __init__(
        self, spec: ProcessSpec, process: asyncio.subprocess.Process, events: int, log: int, screen: Screen
    ) -> None:
        """`events`, `log`: reading ends of its pipes, owned from now on."""
        self.spec = spec
        self.served_s = 0.0  # how long it took requests, known when it has ended
        self._process = process
        self._screen = screen
        self._loop = asyncio.get_running_loop()
        self._ready_at: float | None = None  # loop time
        self._ready: asyncio.Future[Ready | None] = self._loop.create_future()
        pipes = ((events, self._take_event), (log, self._take_line))
        self._pipes = [asyncio.create_task(read_lines(fd, take)) for fd, take in pipes]
        self._end = asyncio.create_task(self._wait_end())

    @classmethod
    async def start(cls, spec: ProcessSpec, screen: Screen) -> "Process":
        """Start it in a group of its own, so that a terminal's Ctrl-C reaches only the supervisor. Raises OSError."""
        events, events_end = os.pipe()
        log, log_end = os.pipe()  # not asyncio's: its wait() would last as long as any process holds the pipe open
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("BATON_") or name == CPU_ISA
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                f"--ready-fd={events_end}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_end,
                stderr=log_end,
                pass_fds=(events_end,),
                process_group=0,
                env={**inherited, **spec.environment},  # BATON_PORT is the service's port, not a worker's
            )
        except BaseException:
            os.close(events)
            os.close(log)
            raise
        finally:
            os.close(events_end)
            os.close(log_end)
        return cls(spec, process, events, log, screen)

    @property
    def is_ready(self) -> bool:
        """True once it has reported that it takes requests."""
        return self._ready_at is not None

    @property
    def is_running(self) -> bool:
        """False once it has ended and its last lines are read."""
        return not self._end.done()

    async def wait_ready(self) -> Ready | None:
        """What it reports when it takes requests; None when it ended before that."""
        return await asyncio.shield(self._ready)

    async def wait_end(self) -> int:
        """Its exit status; negative for a signal."""
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        """Ask it to end."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything it started."""
        with suppress(ProcessLookupError, PermissionError):  # none is left; on some systems only zombies are
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _wait_end(self) -> int:
        code = await self._process.wait()
        self.kill()  # what it may have started: until these end, the group's id is not used again
        if self._ready_at is not None:
            self.served_s = self._loop.time() - self._ready_at
        await asyncio.wait(self._pipes, timeout=LAST_LINES_S)
        for pipe in self._pipes:
            pipe.cancel()
        if not self._ready.done():
            self._ready.set_result(None)
        return code

    def _take_event(self, line: str) -> None:
        try:
            event = parse_event(line)
        except ValueError as error:
            self._take_line(f"ignored: {error}")
            return
        if isinstance(event, Loading):
            self._screen.loading(self.spec.name, event)
        elif not self._ready.done():
            self._ready_at = self._loop.time()
            self._screen.ready(self.spec.name, event)
            self._ready.set_result(event)

    def _take_line(self, line: str) -> None:
        self._screen.log(self.spec.name, line)


async def read_lines(fd: int, take: Callable[[str], None]) -> None:
    """Call `take` with each line of a pipe until its end; one that is too long comes in parts. `fd` is owned here."""
    reader, rest = asyncio.StreamReader(), b""
    transport, _protocol = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), io.FileIO(fd)
    )
    with closing(transport):
        while data := await reader.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LINE_LIMIT_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                take(line.decode(errors="replace"))
    if rest:
        take(rest.decode(errors="replace"))
