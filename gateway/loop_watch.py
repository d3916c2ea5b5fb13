"""Watches the event loop from a thread: which step takes more CPU time than a step may, and where.

A long step holds up all clients. Every PERIOD_S the thread reads the loop's CPU time and stack, which costs the loop
nothing while it is idle. A call that keeps the interpreter's lock is found at its end: the thread gets the lock there.
"""

import asyncio
import gc
import inspect
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, repeat, takewhile
from types import CodeType, FrameType
from typing import Any

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry

_log = structlog.get_logger()

MAX_STEP_S = 0.1  # of the thread's CPU time, by design (docs/LIMITS.md)
PERIOD_S = 0.01  # also how exactly a step is measured
TURN_S = 0.001  # of CPU time until the loop is asked for an answer, which takes less
HUNG_S = 2.0  # such a step is logged while it runs, as it may never end
_MOST_FRAMES = 1 << 14  # of a stack
_SHOWN_FRAMES = 6  # innermost ones


@dataclass(slots=True)
class _Step:
    """One step of the loop as the looks at it found it."""

    key: int | None  # identifies it while it runs; None: the loop waits
    began_s: float  # CPU time of the thread
    began_wall_s: float
    cpu_s: float = 0.0
    wall_s: float = 0.0
    places: Counter[str] = field(default_factory=Counter)
    is_reported: bool = False


def walk_at_once(innermost: FrameType) -> list[FrameType]:
    """All frames of a stack, innermost first, without a moment in which its thread can run: CPython 3.11 then crashed
    (PyFrame_GetBack read a frame that had ended). Between two steps of a loop in Python it could."""
    chain: list[Any] = []
    with suppress(AttributeError):  # of None, which ends it
        chain.extend(accumulate(repeat("f_back", _MOST_FRAMES), getattr, initial=innermost))
    return [frame for frame in chain if frame is not None]


class LoopWatch:
    """Counts and logs long steps of one event loop, from `start` to `close`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = f"Steps of the event loop that took more than {MAX_STEP_S:g} s of CPU time."
        self._metric = prometheus_client.Counter("baton:event_loop_long_steps", text, registry=registry)
        self.num_long = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._ident = self._clock = 0  # of the loop's thread
        self._below: frozenset[CodeType] = frozenset()  # what runs steps
        self._num_turns, self._turned_s = 0, 0.0  # answers of the loop to this thread, and its CPU time at the last

    def start(self) -> None:
        """Must be called by a coroutine of the loop."""
        self._loop, self._ident = asyncio.get_running_loop(), threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._ident)
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))]
        first = next(at for at, code in enumerate(codes) if not code.co_flags & inspect.CO_COROUTINE)
        self._below = frozenset(codes[first:])
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        before, before_wall, num_turns = self._cpu_s(), time.monotonic(), 0
        step = _Step(None, before, before_wall)
        is_asked = False
        while not self._is_closed:
            time.sleep(PERIOD_S)  # an Event's wait takes twice the CPU time
            now, now_wall = self._cpu_s(), time.monotonic()
            key, place = self._look()
            if key != step.key or num_turns != self._num_turns:
                self._end(step)
                step = _Step(key, max(before, self._turned_s), before_wall)
                is_asked &= num_turns == self._num_turns
                num_turns = self._num_turns
            if key is not None:
                step.cpu_s, step.wall_s = now - step.began_s, now_wall - step.began_wall_s
                step.places[place] += 1
                self._report_hung(step)
            if not is_asked and now > self._turned_s + TURN_S:
                is_asked = True
                self._loop.call_soon_threadsafe(self._turn)
            before, before_wall = now, now_wall
        self._end(step)

    def _turn(self) -> None:
        self._turned_s = time.thread_time()
        self._num_turns += 1

    def _cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def _look(self) -> tuple[int | None, str]:
        """Which step runs now, and its innermost frames."""
        gc.disable()  # while it collected for a frame's object the loop's thread could run on, and end the frame
        try:
            innermost = sys._current_frames().get(self._ident)
            if innermost is None or not self._is_of_step(innermost):
                return None, ""
            frames = list(takewhile(self._is_of_step, walk_at_once(innermost)))
        finally:
            gc.enable()
        shown = [
            f"{one.f_globals.get('__name__')}.{one.f_code.co_name}:{one.f_lineno}" for one in frames[:_SHOWN_FRAMES]
        ]
        return id(frames[-1]), " < ".join(shown)

    def _is_of_step(self, frame: FrameType) -> bool:
        return frame.f_code not in self._below

    def _end(self, step: _Step) -> None:
        if step.cpu_s > MAX_STEP_S:
            self.num_long += 1
            self._metric.inc()
            self._report("a step of the event loop took long; all clients waited", step)

    def _report_hung(self, step: _Step) -> None:
        if step.wall_s > HUNG_S and not step.is_reported and step.cpu_s > MAX_STEP_S:
            step.is_reported = True
            self._report("a step of the event loop does not end; all clients wait", step)

    def _report(self, event: str, step: _Step) -> None:
        ((place, _),) = step.places.most_common(1)
        _log.warning(event, cpu_s=round(step.cpu_s, 3), wall_s=round(step.wall_s, 3), where=place)
