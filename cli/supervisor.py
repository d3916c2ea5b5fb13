"""Starts the processes of a service in order, starts workers again when they die, and leaves none behind.

workers (at once) -> all ready -> gateway -> ready -> serving -> gateway ends first, then workers
"""

import asyncio
import io
import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress

from cli.plan import ProcessSpec, pin_ports, plan_restart
from cli.screen import Screen
from runtime.child import ChildProcess, describe_exit
from runtime.events import Loading, Ready, parse_event
from runtime.hardware import CPU_ISA

READ_BYTES = 1 << 16
LINE_LIMIT_BYTES = 1 << 20
LAST_LINES_S = 1.0  # in which the pipes of an ended process are read to their end
STOP_MARGIN_S = 10.0  # beyond its drain, for a process to end
KILL_S = 5.0  # for the kernel to end a killed process

PlanGateway = Callable[[list[Ready]], ProcessSpec]


class StartError(Exception):
    """The service did not come up; says why."""


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


class Supervisor:
    """Owns every process of one service."""

    def __init__(self, screen: Screen, start_timeout_s: float, stop_s: float) -> None:
        self._screen = screen
        self._start_timeout_s = start_timeout_s
        self._stop_s = stop_s
        self._workers: list[Process] = []
        self._gateway: list[Process] = []
        self._is_stopping = False

    async def run(self, workers: list[ProcessSpec], plan_gateway: PlanGateway) -> int:
        """Serve until a signal (returns 0), or until the gateway or the start fails (1)."""
        serving = asyncio.create_task(self._serve(workers, plan_gateway))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, serving)
        try:
            self._screen.fail(await serving)
            return 1
        except asyncio.CancelledError:
            return 0
        except StartError as error:
            self._screen.fail(str(error))
            return 1
        finally:
            await self._shut_down()

    def _on_signal(self, serving: asyncio.Task[str]) -> None:
        if self._is_stopping:
            self._kill(*self._gateway, *self._workers)
        else:
            self._is_stopping = True
            self._screen.say("stopping; another signal stops at once")
            serving.cancel()

    async def _serve(self, workers: list[ProcessSpec], plan_gateway: PlanGateway) -> str:
        """Returns why serving ended."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready = await self._start(workers, self._workers)
                [gateway] = await self._start([plan_gateway(ready)], self._gateway)
        except TimeoutError as error:
            waiting = [process.spec.name for process in (*self._workers, *self._gateway) if not process.ready.done()]
            raise StartError(
                f"{', '.join(waiting)} did not become ready within {self._start_timeout_s:g} s: "
                "set --start-timeout-s higher if the model only loads slowly"
            ) from error
        self._screen.serving(gateway)
        keeping = asyncio.gather(*map(self._keep, range(len(ready)), ready))
        try:
            code = await asyncio.shield(self._gateway[0].end)
            return f"the gateway ended with {describe_exit(code)}; its log says why"
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping

    async def _start(self, specs: list[ProcessSpec], group: list[Process]) -> list[Ready]:
        """Start processes at once and wait until all are ready; the first that fails ends the wait."""
        self._screen.say(f"starting {', '.join(spec.name for spec in specs)}")
        for spec in specs:
            try:
                group.append(Process(spec, self._screen))
            except OSError as error:
                raise StartError(f"{spec.name} cannot be started: {error}") from error
        return await asyncio.gather(*map(self._wait_ready, group))

    async def _wait_ready(self, process: Process) -> Ready:
        event = await asyncio.shield(process.ready)
        if event is None:
            raise StartError(describe_failed_start(process.spec, await asyncio.shield(process.end)))
        return event

    async def _keep(self, rank: int, ready: Ready) -> None:
        """Start a worker again on its ports, as often as it dies; a start that fails counts as one more death."""
        spec, streak = pin_ports(self._workers[rank].spec, ready), 0
        while True:
            worker = self._workers[rank]
            code = await asyncio.shield(worker.end)
            restart = plan_restart(code, worker.served_s, streak)
            next_step = f"starts again in {restart[0]:g} s" if restart else "stays ended, as it was asked to"
            num_left = sum(not other.end.done() for other in self._workers)
            left = "1 worker is left" if num_left == 1 else f"{num_left} workers are left"
            text = f"{spec.name} ended with {describe_exit(code)}; {left}; it {next_step}"
            self._screen.say(text, level="warning" if restart else "info")
            if restart is None:
                return
            delay_s, streak = restart
            await asyncio.sleep(delay_s)
            await self._start_again(rank, spec)

    async def _start_again(self, rank: int, spec: ProcessSpec) -> None:
        """Returns when it is ready, or has failed."""
        try:
            worker = self._workers[rank] = Process(spec, self._screen)
        except OSError as error:
            self._screen.say(f"{spec.name} cannot be started: {error}", level="error")
            self._workers[rank].served_s = 0.0  # it is judged once more, as one that failed at its start
            return
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.shield(worker.ready)
        except TimeoutError:
            self._screen.say(f"{spec.name} is killed: not ready within {self._start_timeout_s:g} s", level="error")
            worker.kill()

    async def _shut_down(self) -> None:
        """End the gateway, then the workers: each is asked, given time, and killed."""
        for group in (self._gateway, self._workers):
            for process in group:
                process.terminate()
            if ends := [process.end for process in group]:
                await asyncio.wait(ends, timeout=self._stop_s)
                self._kill(*group)
                await asyncio.wait(ends, timeout=KILL_S)

    def _kill(self, *processes: Process) -> None:
        """Those that still run."""
        for process in processes:
            if not process.end.done():
                self._screen.say(f"{process.spec.name} did not end by itself and is killed", level="warning")
                process.kill()


def describe_failed_start(spec: ProcessSpec, code: int) -> str:
    """Why a process did not come up, as far as its exit status shows, and what to do."""
    advice = (
        "the system killed it, most likely for want of memory: set --kv-memory-mib or --max-context-tokens lower"
        if code == -signal.SIGKILL
        else "its log says why; to run it alone: " + " ".join(spec.command)
    )
    return f"{spec.name} ended with {describe_exit(code)} before it was ready; {advice}"
