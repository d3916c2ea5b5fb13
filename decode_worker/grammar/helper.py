"""A thread for work whose single calls may take minutes and cannot be interrupted: xgrammar's, without Python's lock.

Who waits for it does so for a bounded CPU time; then the thread is left behind with its call, and another one serves.

    run ──► thread works ─► all done, or out of time between two pieces of work ──► results of those done
                 └─ one call takes longer than MAX_STUCK_CPU_S ─► left behind at the lowest priority, ends with the call
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

_LOOK_S = 0.05  # how often to look at the clock of a thread that is late
_LOWEST_PRIORITY = 19


class NoHelperError(Exception):
    """MAX_STUCK threads are left behind and none of them is done yet, or the system gives no further one."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """One piece of work."""

    result: T | Exception
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """What came of a run."""

    done: list[Done[T]]  # the first pieces of work, in their order
    is_stuck: bool  # the next one was left behind; else there was no time for it


class Helper:
    """Used by one thread at a time. Starts its own when it is first needed; that ends with this object."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._left: list[_Worker] = []  # behind

    def run(self, work: Sequence[Callable[[], T]], cpu_s: float) -> Ran[T]:
        """Do the pieces of work one after the other, at least one; no further one is begun after `cpu_s`.

        An exception is a result. Raises NoHelperError.
        """
        self._left = [worker for worker in self._left if worker.is_alive()]
        if len(self._left) >= MAX_STUCK:
            raise NoHelperError(f"no grammar can be followed now: {len(self._left)} calls take too long")
        self._worker = self._worker or self._start()
        job = _Job(work, cpu_s)
        self._worker.jobs.put(job)
        while not job.is_over.wait(_LOOK_S):
            if job.leave_if_stuck(self._worker.cpu_s):
                self._worker.lower_priority()
                self._left.append(self._worker)
                self._worker = None
                return Ran(job.done, is_stuck=True)
        return Ran(job.done, is_stuck=False)

    def _start(self) -> "_Worker":
        worker = _Worker()
        try:
            worker.start()
        except RuntimeError as error:
            raise NoHelperError(f"no grammar can be followed now: {error}; allow this process more threads") from error
        weakref.finalize(self, worker.jobs.put, None)
        return worker


class _Job(Generic[T]):
    """One run. `done` belongs to the thread until it is over or left."""

    def __init__(self, work: Sequence[Callable[[], T]], cpu_s: float) -> None:
        self._work = work
        self._cpu_s = cpu_s
        self._lock = Lock()
        self._is_left = False
        self._began = math.inf  # the piece under way, in thread_time() of the thread
        self.done: list[Done[T]] = []
        self.is_over = Event()

    def do(self) -> bool:
        """On the thread. False when it was left behind."""
        self._began = thread_time()
        until = self._began + self._cpu_s
        for piece in self._work:
            if self.done and self._began >= until:
                break
            try:
                result: T | Exception = piece()
            except Exception as error:
                result = error
            with self._lock:
                if self._is_left:
                    return False
                now = thread_time()
                self.done.append(Done(result, now - self._began))
                self._began = now
        self.is_over.set()
        return True

    def leave_if_stuck(self, cpu_s: Callable[[], float]) -> bool:
        """Whether nobody is to wait for the piece under way any more. `cpu_s`: the thread's clock."""
        with self._lock:
            self._is_left = cpu_s() - self._began > MAX_STUCK_CPU_S
        return self._is_left


class _Worker(Thread):
    """Does jobs until it is told None, or left behind."""

    def __init__(self) -> None:
        super().__init__(name="grammar-step", daemon=True)
        self.jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None and job.do():
            pass

    def cpu_s(self) -> float:
        """What the thread has taken: its thread_time()."""
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def lower_priority(self) -> None:
        """As far as the system lets us; no-op for a thread that has ended meanwhile."""
        assert self.native_id is not None
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.native_id, _LOWEST_PRIORITY)
