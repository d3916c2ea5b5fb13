"""A process of `baton serve`: its start, what it reports, and its end."""

import asyncio
import io
import os
import socket
from collections.abc import Callable
from contextlib import closing

import msgspec

from cli.plan import ProcessSpec
from runtime.child import ChildProcess
from runtime.events import Event, ModelState, Ready, parse_event
from runtime.hardware import CHECK_STEPS, CPU_ISA
from wire.private_folders import IS_PRIVATE

READ_BYTES = 1 << 16
LINE_LIMIT_BYTES = 1 << 20
LAST_LINES_S = 1.0  # in which the pipes of an ended process are read to their end


class Process(ChildProcess):
    """A child in a group of its own, so that a terminal's Ctrl-C reaches only the supervisor."""

    def __init__(
        self, spec: ProcessSpec, on_event: Callable[["Process", Event], None], on_line: Callable[[str, str], None]
    ) -> None:
        """Start it. `on_event` gets what it reports, `on_line` its name and a log line. Raises OSError."""
        events, events_end = socket.socketpair()
        log, log_end = os.pipe()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("BATON_") or name in (CPU_ISA, CHECK_STEPS, IS_PRIVATE)
        }
        environment = {**inherited, **spec.environment}  # BATON_PORT is the service's port, not a worker's
        command = (*spec.command, f"--ready-fd={events_end.fileno()}")
        try:
            super().__init__(command, environment, (events_end.fileno(),), output=log_end, has_group=True)
        except BaseException:
            events.close()
            os.close(log)
            raise
        finally:
            events_end.close()
            os.close(log_end)
        self.spec = spec
        self.progress = 0.0  # share of its weights that it has read
        self.served_s = 0.0  # how long it took requests, known when it has ended
        self.ready: asyncio.Future[Ready | None] = asyncio.get_running_loop().create_future()  # None: it ended before
        self._on_event, self._on_line = on_event, on_line
        self._events: asyncio.StreamWriter | None = None
        self._ready_at = 0.0  # loop time
        self._pipes = [asyncio.create_task(self._read_events(events)), asyncio.create_task(self._read_log(log))]
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

    def send(self, event: ModelState) -> None:
        """Send the event to a gateway that has reported something."""
        assert self._events is not None
        self._events.write(msgspec.json.encode(event) + b"\n")

    async def _read_events(self, events: socket.socket) -> None:
        reader, self._events = await asyncio.open_unix_connection(sock=events)
        with closing(self._events):
            await read_lines(reader, self._take_event)

    async def _read_log(self, fd: int) -> None:
        reader = asyncio.StreamReader()
        transport, _protocol = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), io.FileIO(fd)
        )
        with closing(transport):
            await read_lines(reader, self._take_line)

    def _take_event(self, line: str) -> None:
        try:
            event = parse_event(line)
        except ValueError as error:
            self._take_line(f"ignored: {error}")
            return
        if isinstance(event, Ready):
            if self.ready.done():
                return
            self._ready_at = asyncio.get_running_loop().time()
            self.ready.set_result(event)
        self._on_event(self, event)

    def _take_line(self, line: str) -> None:
        self._on_line(self.spec.name, line)


async def read_lines(reader: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """Call `take` with each line until the end; one that is too long comes in parts."""
    rest = b""
    try:
        while data := await reader.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LINE_LIMIT_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                take(line.decode(errors="replace"))
    except ConnectionError:  # a socket whose other end was killed with unread bytes
        pass
    if rest:
        take(rest.decode(errors="replace"))
