"""Starts the processes of a service in order, starts workers again when they die, and leaves none behind.

workers (at once) -> all ready -> gateway -> ready -> serving -> gateway ends first, then workers

While it serves, the gateway may ask for the workers of a model to be stopped, and started again:

    awake ──SetAwake(False)──► workers drain and end ──► asleep ──SetAwake(True)──► waking ──all ready──► awake
                                                           ▲                          └── failed ◄─ they cannot start
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

from cli.plan import ProcessSpec, find_addresses, pin_ports, plan_restart
from cli.process import Process
from cli.screen import Screen
from runtime.child import describe_exit
from runtime.events import Event, Loading, ModelState, Ready, SetAwake

STOP_MARGIN_S = 10.0  # beyond its drain, for a process to end
KILL_S = 5.0  # for the kernel to end a killed process
MAX_WAKE_STARTS = 3  # of a worker in a row that do not become ready; then its model is not woken

PlanGateway = Callable[[list[Ready]], ProcessSpec]


class StartError(Exception):
    """The service, or a model, did not come up; says why."""


class Supervisor:
    """Owns every process of one service."""

    def __init__(self, screen: Screen, start_timeout_s: float, stop_s: float) -> None:
        self._screen = screen
        self._start_timeout_s = start_timeout_s
        self._stop_s = stop_s
        self._models: Mapping[str, Sequence[str]] = {}  # model |-> names of its workers
        self._specs: dict[str, ProcessSpec] = {}  # worker |-> how it is started
        self._workers: dict[str, Process] = {}  # worker |-> its latest process
        self._gateway: list[Process] = []
        self._keeping: dict[str, asyncio.Task[None]] = {}  # worker |-> what starts it again
        self._changing: dict[str, asyncio.Task[None]] = {}  # model |-> what puts it to sleep, or wakes it
        self._is_stopping = False

    async def run(
        self, workers: Mapping[str, Sequence[ProcessSpec]], plan_gateway: PlanGateway, num_awake: int = 0
    ) -> int:
        """Serve until a signal (returns 0), or until the gateway or the start fails (1).

        `workers`: by model. `num_awake`: how many models, from the first, are started at once; 0: all.
        """
        serving = asyncio.create_task(self._serve(workers, plan_gateway, num_awake or len(workers)))
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
            self._kill(*self._gateway, *self._workers.values())
        else:
            self._is_stopping = True
            self._screen.say("stopping; another signal stops at once")
            serving.cancel()

    async def _serve(
        self, workers: Mapping[str, Sequence[ProcessSpec]], plan_gateway: PlanGateway, num_awake: int
    ) -> str:
        """Returns why serving ended."""
        self._models = {model: [spec.name for spec in specs] for model, specs in workers.items()}
        self._specs = {spec.name: spec for specs in workers.values() for spec in specs}
        first = [name for model in list(self._models)[:num_awake] for name in self._models[model]]
        try:
            gateway = await self._start_all(first, plan_gateway)
            self._screen.serving(gateway)
            code = await asyncio.shield(self._gateway[0].end)
            return f"the gateway ended with {describe_exit(code)}; its log says why"
        finally:
            tasks = [*self._changing.values(), *self._keeping.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_all(self, first: Sequence[str], plan_gateway: PlanGateway) -> Ready:
        """Start all processes. Returns what the gateway reports. Raises StartError."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready = await self._start_workers(first)
                self._keep_all(first)
                spec = plan_gateway(ready)
                self._screen.say(f"starting {spec.name}")
                self._gateway.append(self._start(spec))
                return await self._wait_ready(self._gateway[0])
        except TimeoutError as error:
            started = (*self._workers.values(), *self._gateway)
            waiting = [process.spec.name for process in started if not process.ready.done()]
            raise StartError(self._describe_late(waiting)) from error

    def _describe_late(self, names: Sequence[str]) -> str:
        return (
            f"{', '.join(names)} did not become ready within {self._start_timeout_s:g} s: "
            "set --start-timeout-s higher if the model only loads slowly"
        )

    def _start(self, spec: ProcessSpec) -> Process:
        """Raises StartError."""
        try:
            return Process(spec, self._on_event, self._screen.log)
        except OSError as error:
            raise StartError(f"{spec.name} cannot be started: {error}") from error

    async def _start_workers(self, names: Sequence[str]) -> list[Ready]:
        """Start them at once and wait until all are ready; the first that fails ends the wait."""
        self._screen.say(f"starting {', '.join(names)}")
        for name in names:
            self._workers[name] = self._start(self._specs[name])
        ready = await asyncio.gather(*(self._wait_ready(self._workers[name]) for name in names))
        self._pin(names, ready)
        return ready

    async def _wait_ready(self, process: Process) -> Ready:
        event = await asyncio.shield(process.ready)
        if event is None:
            raise StartError(describe_failed_start(process.spec, await asyncio.shield(process.end)))
        return event

    def _pin(self, names: Sequence[str], ready: Sequence[Ready]) -> None:
        for name, event in zip(names, ready, strict=True):
            self._specs[name] = pin_ports(self._specs[name], event)

    def _on_event(self, process: Process, event: Event) -> None:
        name = process.spec.name
        if isinstance(event, Ready):
            self._screen.ready(name, event)
        elif isinstance(event, Loading):
            self._screen.loading(name, event)
            process.progress = event.done / max(event.total, 1) if event.what == "weights" else process.progress
            if name in self._specs and (model := self._find_model(name)) in self._changing:
                done = [self._workers[one].progress for one in self._models[model] if one in self._workers]
                self._tell(model, "waking", percent=int(100 * sum(done) / len(self._models[model])))
        elif isinstance(event, SetAwake):  # one change of a model at a time: the gateway waits for its answer
            change = self._wake(event.model) if event.is_awake else self._put_to_sleep(event.model)
            self._changing[event.model] = asyncio.create_task(self._change(event.model, change))

    def _find_model(self, worker: str) -> str:
        return next(model for model, names in self._models.items() if worker in names)

    def _tell(self, model: str, state: Literal["awake", "waking", "asleep", "failed"], **fields: Any) -> None:
        self._gateway[0].send(ModelState(model, state, **fields))

    # -- models that sleep -------------------------------------------------------------------------------------------

    async def _change(self, model: str, change: Coroutine[None, None, None]) -> None:
        """The gateway hears of each change's end, as it waits for that."""
        try:
            await change
        except Exception as bug:
            self._screen.say(f"{model} cannot be changed: {bug!r}", level="error")
            self._changing.pop(model, None)
            self._tell(model, "failed", reason=repr(bug))

    async def _put_to_sleep(self, model: str) -> None:
        """Drain and end its workers; one that dies meanwhile is not started again."""
        names = self._models[model]
        for name in names:
            self._keeping[name].cancel()
        await self._end([self._workers[name] for name in names])
        self._screen.say(f"{model} is asleep: {', '.join(names)} ended", "asleep", model=model)
        del self._changing[model]
        self._tell(model, "asleep")

    async def _wake(self, model: str) -> None:
        """Start its workers, again where they die, until all are ready; else end them."""
        names, began = self._models[model], asyncio.get_running_loop().time()
        self._screen.say(f"{model} wakes: starting {', '.join(names)}", "waking", model=model)
        starts = [asyncio.create_task(self._wake_worker(name)) for name in names]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready = await asyncio.gather(*starts)
        except (TimeoutError, StartError) as error:
            for start in starts:
                start.cancel()
            processes = [self._workers[name] for name in names if name in self._workers]
            late = [process.spec.name for process in processes if not process.ready.done()]
            reason = str(error) if isinstance(error, StartError) else self._describe_late(late)
            self._screen.say(f"{model} does not wake: {reason}", "wake failed", "error", model=model, reason=reason)
            await self._end(processes)
            del self._changing[model]
            self._tell(model, "failed", reason=reason)
            return
        self._pin(names, ready)
        self._keep_all(names)
        woke_s = asyncio.get_running_loop().time() - began
        self._screen.say(f"{model} is awake after {woke_s:.1f} s", "awake", model=model, seconds=round(woke_s, 3))
        del self._changing[model]
        prefill, decode = find_addresses(ready)
        self._tell(model, "awake", prefill=prefill, decode=decode)

    async def _wake_worker(self, name: str) -> Ready:
        """Raises StartError."""
        streak = 0
        while True:
            process = self._workers[name] = self._start(self._specs[name])
            if (event := await asyncio.shield(process.ready)) is not None:
                return event
            code = await asyncio.shield(process.end)
            restart = plan_restart(code, 0.0, streak)
            if restart is None or restart[1] >= MAX_WAKE_STARTS:
                raise StartError(describe_failed_start(process.spec, code))
            delay_s, streak = restart
            text = f"{name} ended with {describe_exit(code)} while it was waking; it starts again in {delay_s:g} s"
            self._screen.say(text, level="warning")
            await asyncio.sleep(delay_s)

    # -- workers that die --------------------------------------------------------------------------------------------

    def _keep_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._keeping[name] = asyncio.create_task(self._keep(name))

    async def _keep(self, name: str) -> None:
        """Start a worker again on its ports, as often as it dies; a start that fails counts as one more death."""
        streak = 0
        while True:
            worker = self._workers[name]
            code = await asyncio.shield(worker.end)
            restart = plan_restart(code, worker.served_s, streak)
            next_step = f"starts again in {restart[0]:g} s" if restart else "stays ended, as it was asked to"
            num_left = sum(not other.end.done() for other in self._workers.values())
            left = "1 worker is left" if num_left == 1 else f"{num_left} workers are left"
            text = f"{name} ended with {describe_exit(code)}; {left}; it {next_step}"
            self._screen.say(text, level="warning" if restart else "info")
            if restart is None:
                return
            delay_s, streak = restart
            await asyncio.sleep(delay_s)
            await self._start_again(name)

    async def _start_again(self, name: str) -> None:
        """Returns when it is ready, or has failed."""
        try:
            worker = self._workers[name] = self._start(self._specs[name])
        except StartError as error:
            self._screen.say(str(error), level="error")
            self._workers[name].served_s = 0.0  # it is judged once more, as one that failed at its start
            return
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.shield(worker.ready)
        except TimeoutError:
            self._screen.say(f"{name} is killed: not ready within {self._start_timeout_s:g} s", level="error")
            worker.kill()

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """End the gateway, then the workers."""
        await self._end(self._gateway)
        await self._end(list(self._workers.values()))

    async def _end(self, processes: Sequence[Process]) -> None:
        """Ask each process to end, give it time, and kill it."""
        for process in processes:
            process.terminate()
        if ends := [process.end for process in processes]:
            await asyncio.wait(ends, timeout=self._stop_s)
            self._kill(*processes)
            await asyncio.wait(ends, timeout=KILL_S)

    def _kill(self, *processes: Process) -> None:
        """Kill those that still run."""
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
