"""Starts the processes of a service in order, starts workers that die again, and leaves none behind.

Knows order, deadlines and signals; what is shown is `cli/screen.py`, what is started `cli/plan.py`, and again when
`cli/restart.py`.

    workers (at once) -> all ready -> gateway -> ready -> serving -> gateway ends first, then workers
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from cli.child import Child
from cli.plan import ChildSpec, pin_ports
from cli.restart import MOST_DELAY_S, Restart, plan_restart
from cli.screen import Screen, render_log_line
from runtime.events import Ready

STOP_MARGIN_S = 10.0  # beyond its drain, for a process to let go
KILL_S = 5.0  # for the kernel to end what was killed

PlanGateway = Callable[[list[Ready]], ChildSpec]


class StartError(Exception):
    """The service did not come up; says why."""


class Supervisor:
    """Owns every process of one service."""

    def __init__(self, screen: Screen, start_timeout_s: float, stop_s: float) -> None:
        self._screen = screen
        self._start_timeout_s = start_timeout_s
        self._stop_s = stop_s
        self._workers: list[Child] = []
        self._gateway: list[Child] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self, workers: list[ChildSpec], plan_gateway: PlanGateway) -> int:
        """Serve until asked to stop (0), or until the gateway or the start fails (1)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._unless_stopped(self._serve(workers, plan_gateway))
        except StartError as error:
            self._screen.fail(str(error))
            return 1
        finally:
            await self._shut_down()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        else:
            self._stop.set()
            self._screen.tell("stopping; once more to stop at once")

    async def _unless_stopped(self, work: Coroutine[Any, Any, int]) -> int:
        """The result of `work`, or 0 when a signal came first; then `work` is cancelled."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else 0
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))

    async def _serve(self, workers: list[ChildSpec], plan_gateway: PlanGateway) -> int:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready = await self._start(workers, self._workers)
                gateway = await self._start([plan_gateway(ready)], self._gateway)
        except TimeoutError as error:
            raise StartError(self._describe_timeout()) from error
        self._screen.serving(gateway[0])
        self._keepers = [asyncio.create_task(self._keep(rank, event)) for rank, event in enumerate(ready)]
        code = await self._gateway[0].wait_exited()
        self._screen.fail(f"the gateway ended with {describe_exit(code)}; its last lines are above")
        return 1

    async def _start(self, specs: list[ChildSpec], owned: list[Child]) -> list[Ready]:
        """Start processes at once and wait until all are ready; the first that fails ends the wait."""
        owned += map(self._new_child, specs)
        for child in owned:
            try:
                await child.start()
            except OSError as error:
                raise StartError(f"{child.spec.name} cannot be started: {error}") from error
        self._screen.starting([spec.name for spec in specs])
        waits = [asyncio.create_task(self._wait_ready(child)) for child in owned]
        try:
            return await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    def _new_child(self, spec: ChildSpec) -> Child:
        return Child(spec, self._screen.loading, self._screen.log)

    async def _wait_ready(self, child: Child) -> Ready:
        event = await child.wait_ready()
        if event is None:
            code = await child.wait_exited()
            raise StartError(describe_failed_start(child, code))
        self._screen.ready(child.spec.name, event)
        return event

    async def _keep(self, rank: int, ready: Ready) -> None:
        """Start a worker again where it was, as often as it dies; a start that fails counts as one more death."""
        spec, streak = pin_ports(self._workers[rank].spec, ready), 0
        while True:
            worker = self._workers[rank]
            code = await worker.wait_exited()
            restart = plan_restart(code, worker.served_s, streak)
            self._tell_end(spec.name, code, restart)
            if restart is None:
                return
            streak = restart.streak
            await asyncio.sleep(restart.delay_s)
            await worker.close()
            await self._start_again(rank, spec)

    async def _start_again(self, rank: int, spec: ChildSpec) -> None:
        """Returns when it is ready, or has ended."""
        while True:
            worker = self._workers[rank] = self._new_child(spec)
            try:
                await worker.start()
                break
            except OSError as error:
                self._screen.tell(f"{spec.name} cannot be started: {error}; tried again in {MOST_DELAY_S:g} s")
                await asyncio.sleep(MOST_DELAY_S)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                event = await worker.wait_ready()
        except TimeoutError:
            self._screen.tell(f"{spec.name} did not become ready within {self._start_timeout_s:g} s and is killed")
            worker.kill()
        else:
            if event is not None:
                self._screen.ready(spec.name, event)

    def _tell_end(self, name: str, code: int, restart: Restart | None) -> None:
        alive = sum(other.is_running for other in self._workers)
        plan = "stays ended, as it was asked to" if restart is None else f"starts again in {restart.delay_s:g} s"
        self._screen.tell(f"{name} ended with {describe_exit(code)}; {alive} workers are left; it {plan}")

    def _describe_timeout(self) -> str:
        waiting = [child.spec.name for child in (*self._workers, *self._gateway) if not child.is_ready]
        return (
            f"{', '.join(waiting)} did not become ready within {self._start_timeout_s:g} s: "
            "set --start-timeout-s higher if the model only loads slowly"
        )

    async def _shut_down(self) -> None:
        """End the gateway, then the workers: each is asked, given time, and killed. A second signal kills at once."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for group in (self._gateway, self._workers):
            for child in group:
                child.terminate()
            await self._wait_all_exited(group)
        for child in (*self._gateway, *self._workers):
            await child.close()

    async def _wait_all_exited(self, group: list[Child]) -> None:
        running = [child for child in group if child.is_running]
        if not running:
            return
        exits = asyncio.gather(*(child.wait_exited() for child in running))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((exits, hurry), timeout=self._stop_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        for child in running:
            if child.is_running:
                self._screen.tell(f"{child.spec.name} did not end by itself and is killed")
                child.kill()
        await asyncio.wait((exits,), timeout=KILL_S)
        exits.cancel()


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def describe_failed_start(child: Child, code: int) -> str:
    """Why a process did not come up, as far as its log tells, and what to do."""
    said = [text for text in map(render_log_line, child.tail) if text is not None]
    lines = "\n".join(f"    {text}" for text in said) or "    (it said nothing)"
    advice = (
        "the system killed it, most likely for want of memory: set --kv-memory-mib or --max-context-tokens lower"
        if code == -signal.SIGKILL
        else "the last line above says what to change; to see it alone, run the command below"
    )
    command = " ".join(child.spec.command)
    return f"{child.spec.name} ended with {describe_exit(code)} before it was ready:\n{lines}\n{advice}\n    {command}"
