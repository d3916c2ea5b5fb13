"""Virtual time, drawn names and a silent log for the real modules that read clocks, draw names and write logs."""

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from decode_worker.speculation import drafters, speculator
from engine import out_of_memory, steps
from gateway.adapters import loader
from gateway.answer import choices
from gateway.api import access
from gateway.api.http import answer
from gateway.api.responses import writer
from gateway.request import check, prepare
from gateway.router import changes, decode_client, fleet, router, worker_client
from gateway.scaling import sleepers
from gateway.store import keeper, line, replay, run, runs
from runtime import tasks
from tests.simulator.world import ViolationError, World
from worker import loop

EPOCH_S = 1e9  # Unix time of a world's beginning
_TIMES: tuple[Any, ...] = (loop, drafters, choices, keeper, prepare, replay, runs, writer)
_SECRETS: tuple[Any, ...] = (access, check, writer)
_STREAMS: Any = decode_client
_LOGS: tuple[Any, ...] = (
    loader,
    out_of_memory, steps, speculator, changes, decode_client, fleet, router, sleepers, worker_client, tasks,
    answer, choices, line, run, runs,
)  # fmt: skip


class _Clock:
    """Replaces the module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    perf_counter = monotonic

    def time(self) -> float:
        return EPOCH_S + self._world.now


class _Secrets:
    """Replaces the module `secrets`."""

    def __init__(self, world: World) -> None:
        self._rng = random.Random(f"secrets {world.seed}")
        self.randbits = self._rng.getrandbits

    def token_hex(self, num_bytes: int) -> str:
        return self._rng.randbytes(num_bytes).hex()


class _Log:
    """Drops reports of what fails on purpose; any other error is a violation."""

    def __init__(self, world: World) -> None:
        self._world = world

    def error(self, event: str, reason: str = "", **more: Any) -> None:
        if event != "step not computed" and not event.startswith(("no ", "model is failed")):
            self._violate(f"{event}: {reason or more}")

    def exception(self, event: str, **_: Any) -> None:
        self._violate(f"{event}: {sys.exc_info()[1]!r}")

    def warning(self, event: str, **facts: Any) -> None:
        """Of workers that do not answer, attempts that fail."""
        self._world.note("log", event, facts)

    info = debug = warning

    def bind(self, **_: Any) -> "_Log":
        return self

    def _violate(self, message: str) -> None:
        self._world.violation = ViolationError(message)
        raise self._world.violation


@contextmanager
def virtual(world: World) -> Iterator[None]:
    """Within it these modules use `world`'s time, names and log."""
    clock, log, secrets, names = _Clock(world), _Log(world), _Secrets(world), itertools.count(1)
    with ExitStack() as stack:
        stack.enter_context(patch.object(_STREAMS, "new_incarnation", lambda: str(next(names))))
        for module in _TIMES:
            stack.enter_context(patch.object(module, "time", clock))
        for module in _SECRETS:
            stack.enter_context(patch.object(module, "secrets", secrets))
        for module in _LOGS:
            stack.enter_context(patch.object(module, "log" if hasattr(module, "log") else "_log", log))
        yield
