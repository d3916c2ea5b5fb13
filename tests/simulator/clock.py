"""Virtual time and a silent log for the real modules that read clocks and write logs."""

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from decode_worker.speculation import drafters, speculator
from engine import steps
from gateway.router import changes, decode_client, fleet, router, worker_client
from gateway.scaling import sleepers
from tests.simulator.world import ViolationError, World
from worker import loop

_MODULES: tuple[Any, ...] = (loop, drafters)
_STREAMS: Any = decode_client
_LOGS: tuple[Any, ...] = (steps, speculator, changes, decode_client, fleet, router, sleepers, worker_client)


class _Clock:
    """Replaces the module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    perf_counter = monotonic


class _Log:
    """Drops reports of what fails on purpose; any other error is a violation."""

    def error(self, event: str, reason: str = "", **more: Any) -> None:
        if event != "step not computed" and not event.startswith(("no ", "model is failed")):
            raise ViolationError(f"{event}: {reason or more}")

    def exception(self, event: str, **_: Any) -> None:
        raise ViolationError(f"{event}: {sys.exc_info()[1]!r}")

    def warning(self, event: str, **_: Any) -> None:
        """Of workers that do not answer, attempts that fail."""

    info = debug = warning

    def bind(self, **_: Any) -> "_Log":
        return self


_LOG = _Log()


@contextmanager
def virtual(world: World) -> Iterator[None]:
    """Within it these modules use `world`'s time."""
    clock, logs, new_incarnation = _Clock(world), [module.log for module in _LOGS], _STREAMS.new_incarnation
    names = itertools.count(1)
    _STREAMS.new_incarnation = lambda: str(next(names))
    for module in _MODULES:
        module.time = clock
    for module in _LOGS:
        module.log = _LOG
    try:
        yield
    finally:
        for module in _MODULES:
            module.time = time
        _STREAMS.new_incarnation = new_incarnation
        for module, log in zip(_LOGS, logs, strict=True):
            module.log = log
