"""A thread for calls that may take minutes and cannot be interrupted: xgrammar's, which release Python's lock.

The caller waits for a bounded CPU time. After that the thread is abandoned with its call, and another one takes over.

    run ──► thread works ─► all done, or out of time between two calls ──► results of those done
                 └─ one call takes longer than MAX_STUCK_CPU_S ─► abandoned at the lowest priority, ends with the call
"""

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import thread_time
from typing import Any, Generic, TypeVar

from decode_worker.grammar.limits import MAX_STUCK, MAX_STUCK_CPU_S

T = TypeVar("T")

_LOOK_S = 0.05  # how often to read the clock of a thread that is late
_LOWEST_PRIORITY = 19


class NoThreadError(Exception):
    """MAX_STUCK threads are abandoned and still run, or the system gives no further one."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """One call."""

    result: T | Exception
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """The result of a run."""

    done: list[Done[T]]  # the first calls, in their order
    is_stuck: bool  # the next call was abandoned; otherwise there was no time for it


class StepThread:
    """Used by one thread at a time. Starts its own at the first run; that ends with this object."""

    def __init__(self) -> None:
        self._thread: _Thread | None = None
        self._abandoned: list[_Thread] = []

    def run(self, calls: Sequence[Callable[[], T]], cpu_s: float) -> Ran[T]:
        """Make the calls one after the other, at least one; none begins after `cpu_s`.

        An exception is a result. Raises NoThreadError.
        """
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MAX_STUCK:
            raise NoThreadError(f"no grammar can be followed now: {len(self._abandoned)} calls take too long")
        self._thread = self._thread or self._start()
        run = _Run(calls, cpu_s)
        self._thread.runs.put(run)
        while not run.is_over.wait(_LOOK_S):
            if run.abandon_if_stuck(self._thread.cpu_s):
                self._thread.lower_priority()
                self._abandoned.append(self._thread)
                self._thread = None
                return Ran(run.done, is_stuck=True)
        return Ran(run.done, is_stuck=False)

    def _start(self) -> "_Thread":
        thread = _Thread()
        try:
            thread.start()
        except RuntimeError as error:
            raise NoThreadError(f"no grammar can be followed now: {error}; allow this process more threads") from error
        weakref.finalize(self, thread.runs.put, None)
        return thread


class _Run(Generic[T]):
    """`done` belongs to the thread until the run is over or abandoned."""

    def __init__(self, calls: Sequence[Callable[[], T]], cpu_s: float) -> None:
        self._calls = calls
        self._cpu_s = cpu_s
        self._lock = Lock()
        self._is_abandoned = False
        self._began = math.inf  # the present call, in thread_time() of the thread
        self.done: list[Done[T]] = []
        self.is_over = Event()

    def do(self) -> bool:
        """On the thread. False if the run was abandoned."""
        self._began = thread_time()
        until = self._began + self._cpu_s
        for call in self._calls:
            if self.done and self._began >= until:
                break
            try:
                result: T | Exception = call()
            except Exception as error:
                result = error
            with self._lock:
                if self._is_abandoned:
                    return False
                now = thread_time()
                self.done.append(Done(result, now - self._began))
                self._began = now
        self.is_over.set()
        return True

    def abandon_if_stuck(self, cpu_s: Callable[[], float]) -> bool:
        """Whether the present call has had its time. `cpu_s`: the thread's clock."""
        with self._lock:
            self._is_abandoned = cpu_s() - self._began > MAX_STUCK_CPU_S
        return self._is_abandoned


class _Thread(Thread):
    """Does runs until it gets None, or is abandoned."""

    def __init__(self) -> None:
        super().__init__(name="grammar-step", daemon=True)
        self.runs: SimpleQueue[_Run[Any] | None] = SimpleQueue()

    def run(self) -> None:
        while (run := self.runs.get()) is not None and run.do():
            pass

    def cpu_s(self) -> float:
        """CPU time of the thread: its thread_time()."""
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def lower_priority(self) -> None:
        """As far as the system permits; no-op for a thread that has ended."""
        assert self.native_id is not None
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.native_id, _LOWEST_PRIORITY)
