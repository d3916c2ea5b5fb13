"""A thread for calls that may take minutes and cannot be interrupted: xgrammar's, which release Python's lock.

The caller waits for a bounded CPU time. After that the thread is abandoned with its call, and another one takes over.

    run ──► thread works ─► all done, or out of time between two calls ──► results of those done
                 └─ one call takes longer than MAX_STUCK_CPU_S ─► abandoned at the lowest priority, ends with the call
"""

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


class StuckError(Exception):
    """The call was abandoned."""


@dataclass(frozen=True, slots=True)
class TurnEnd(Generic[T]):
    """One call."""

    result: T | Exception
    cpu_s: float


class StepThread:
    """Used by one thread at a time. Starts its own at the first run; that ends with this object."""

    def __init__(self) -> None:
        self._thread: _Thread | None = None
        self._abandoned: list[_Thread] = []

    def run(self, calls: Sequence[Callable[[], T]], cpu_s: float) -> list[TurnEnd[T]]:
        """Make the calls one after the other, at least one; none begins after `cpu_s`. Returns those made.

        An exception is a result; StuckError, of the last one, if the call was abandoned. Raises NoThreadError.
        """
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MAX_STUCK:
            raise NoThreadError(f"no grammar can be followed now: {len(self._abandoned)} calls take too long")
        thread = self._thread = self._thread or self._start()
        thread.begin(calls, cpu_s)
        while not thread.is_over.wait(_LOOK_S):
            if thread.abandon_if_stuck():
                self._abandoned.append(thread)
                self._thread = None
                return [*thread.done, TurnEnd(StuckError(), MAX_STUCK_CPU_S)]
        return thread.done

    def _start(self) -> "_Thread":
        thread = _Thread()
        try:
            thread.start()
        except RuntimeError as error:
            raise NoThreadError(f"no grammar can be followed now: {error}; allow this process more threads") from error
        weakref.finalize(self, thread.runs.put, None)
        return thread


class _Thread(Thread):
    """Makes one run's calls at a time, until it is abandoned."""

    def __init__(self) -> None:
        super().__init__(name="grammar-step", daemon=True)
        self.runs: SimpleQueue[tuple[Sequence[Callable[[], Any]], float] | None] = SimpleQueue()  # None: the end
        self.is_over = Event()  # the run
        self.done: list[TurnEnd[Any]] = []  # the thread's until the run is over or abandoned
        self._lock = Lock()
        self._is_abandoned = False
        self._began = 0.0  # the present call, in thread_time() of the thread

    def begin(self, calls: Sequence[Callable[[], Any]], cpu_s: float) -> None:
        self.done = []
        self.is_over.clear()
        self.runs.put((calls, cpu_s))

    def run(self) -> None:
        while not self._is_abandoned and (work := self.runs.get()) is not None:
            calls, cpu_s = work
            self._began = thread_time()
            until = self._began + cpu_s
            for call in calls:
                if self._is_abandoned or (self.done and self._began >= until):
                    break
                self._call(call)
            self.is_over.set()

    def _call(self, call: Callable[[], Any]) -> None:
        try:
            result = call()
        except Exception as error:
            result = error
        with self._lock:
            now = thread_time()
            if not self._is_abandoned:
                self.done.append(TurnEnd(result, now - self._began))
            self._began = now

    def abandon_if_stuck(self) -> bool:
        """Abandon it if the present call has had its time."""
        with self._lock:
            self._is_abandoned = self.cpu_s() - self._began > MAX_STUCK_CPU_S
        if self._is_abandoned:
            assert self.native_id is not None
            with suppress(OSError):  # it may have ended, or the system does not permit it
                os.setpriority(os.PRIO_PROCESS, self.native_id, _LOWEST_PRIORITY)
        return self._is_abandoned

    def cpu_s(self) -> float:
        """Its thread_time()."""
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))
