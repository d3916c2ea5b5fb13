"""Virtual time and a silent log for the real modules that read clocks and write logs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from decode_worker.speculation import drafters, speculator
from engine import steps
from tests.simulator.world import ViolationError, World
from worker import loop

_MODULES: tuple[Any, ...] = (loop, drafters)
_LOGS: tuple[Any, ...] = (steps, speculator)


class _Clock:
    """Replaces the module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    perf_counter = monotonic


class _Log:
    """Drops reports of steps that fail on purpose; any other report is a violation."""

    def error(self, event: str, reason: str, **_: Any) -> None:
        if event != "step not computed":
            raise ViolationError(f"{event}: {reason}")


_LOG = _Log()


@contextmanager
def virtual(world: World) -> Iterator[None]:
    """Within it these modules use `world`'s time."""
    clock, logs = _Clock(world), [module.log for module in _LOGS]
    for module in _MODULES:
        module.time = clock
    for module in _LOGS:
        module.log = _LOG
    try:
        yield
    finally:
        for module in _MODULES:
            module.time = time
        for module, log in zip(_LOGS, logs, strict=True):
            module.log = log
