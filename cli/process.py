"""One process that `baton serve` starts: its two pipes, events and log lines, are shown on the screen."""

import asyncio
import io
import os
from collections.abc import Callable
from contextlib import closing

from cli.plan import ProcessSpec
from cli.screen import Screen
from runtime.child import ChildProcess
from runtime.events import Loading, Ready, parse_event
from runtime.hardware import CPU_ISA

READ_BYTES = 1 << 16
LINE_LIMIT_BYTES = 1 << 20
LAST_LINES_S = 1.0  # in which the pipes of an ended process are read to their end


class Process(ChildProcess):
    """A child in a group of its own, so that a terminal's Ctrl-C reaches only the supervisor."""

    def __init__(self, spec: ProcessSpec, screen: Screen) -> None:
        """Start it. Raises OSError."""
        events, events_end = os.pipe()
        log, log_end = os.pipe()
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("BATON_") or name == CPU_ISA
        }
        environment = {**inherited, **spec.environment}  # BATON_PORT is the service's port, not a worker's
        command = (*spec.command, f"--ready-fd={events_end}")
        try:
            super().__init__(command, environment, (events_end,), output=log_end, has_group=True)
        except BaseException:
            os.close(events)
            os.close(log)
            raise
        finally:
            os.close(events_end)
            os.close(log_end)
        self.spec = spec
        self.served_s = 0.0  # how long it took requests, known when it has ended
        self.ready: asyncio.Future[Ready | None] = asyncio.get_running_loop().create_future()  # None: it ended before
        self._screen = screen
        self._ready_at = 0.0  # loop time
        pipes = ((events, self._take_event), (log, self._take_line))
        self._pipes = [asyncio.create_task(read_lines(fd, take)) for fd, take in pipes]
        self.end = asyncio.create_task(self._finish())  # its exit status, when its last lines are read

    async def _finish(self) -> int:
        code = await self.wait()
        if self.ready.done():
            self.served_s = asyncio.get_running_loop().time() - self._ready_at
        await asyncio.wait(self._pipes, timeout=LAST_LINES_S)
        for pipe in self._pipes:
            pipe.cancel()
        if not self.ready.done():
            self.ready.set_result(None)
        return code

    def _take_event(self, line: str) -> None:
        try:
            event = parse_event(line)
        except ValueError as error:
            self._take_line(f"ignored: {error}")
            return
        if isinstance(event, Loading):
            self._screen.loading(self.spec.name, event)
        elif not self.ready.done():
            self._ready_at = asyncio.get_running_loop().time()
            self._screen.ready(self.spec.name, event)
            self.ready.set_result(event)

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
