"""The thread that runs engine steps, and the lock that guards its owner's state. Knows nothing of engines."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import structlog

from engine.out_of_memory import end_process
from wire.stalls import find_stuck

log = structlog.get_logger()
T = TypeVar("T")

LOOKS = 10  # at the engine's step in --stall-s


@dataclass(frozen=True, slots=True)
class Progress:
    steps: int  # steps done
    step_age_s: float  # since the current step began; 0 when idle
    step_predicted_s: float  # what it was predicted to take; 0 when idle, or if nothing is known

    def find_stuck(self, stall_s: float) -> str | None:
        """See wire/stalls.py."""
        return find_stuck(self.step_age_s, self.step_predicted_s, stall_s)


def call_in_thread(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own; returns or raises its result."""
    done: Future[T] = Future()
    thread = threading.Thread(target=_fulfil, args=(work, done), name="call", daemon=True)
    thread.start()
    thread.join()
    return done.result()


def _fulfil(work: Callable[[], T], done: "Future[T]") -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class EngineThread:
    """Calls `step` while it finds work; otherwise sleeps until `wake` or a deadline."""

    def __init__(
        self,
        step: Callable[[], bool],
        next_deadline: Callable[[], float | None] = lambda: None,
        on_failure: Callable[[], None] = end_process,
    ) -> None:
        """`step` takes `lock` itself and returns whether there was work.

        `next_deadline`: when (time.monotonic) to call `step` even without a wake; called with `lock` held.
        `on_failure`: called on the thread, which then ends, if `step` raises, since its state is then unknown. Not
        called after `stop`: a step that outlasts `stop` may fail only because its consumers are gone.
        """
        self.lock = threading.Lock()
        self.predicted_s = 0.0  # of the current step; set by the step
        self.steps = 0  # done so far
        self.core_share = 1.0  # of its cores that steps have; set by calls
        self._changed = threading.Condition(self.lock)
        self._step = step
        self._next_deadline = next_deadline
        self.on_failure = on_failure  # set before `start`
        self._is_woken = False
        self._is_stopping = False
        self._calls: deque[Callable[[], None]] = deque()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end_when_stuck(self, stall_s: float, times: int) -> None:
        """From now on end the process, by `on_failure`, once a step is stuck for so many times `stall_s`."""
        threading.Thread(target=self._watch, args=(stall_s, times), name="watch", daemon=True).start()

    def _watch(self, stall_s: float, times: int, pause: Callable[[float], None] = time.sleep) -> None:
        """Looks twice at a stuck step: a process that was frozen itself has the time in between to end it."""
        seen = -1  # steps done before one that was stuck at the last look
        while True:
            progress = self.progress()
            is_stuck = progress.find_stuck(times * stall_s) is not None
            if is_stuck and seen == progress.steps:
                log.error("stuck: this process ends", reason=progress.find_stuck(stall_s), exit_when_stuck=times)
                self.on_failure()
                return
            seen = progress.steps if is_stuck else -1
            pause(stall_s / LOOKS)

    def stop(self, timeout_s: float) -> None:
        """End after the current step, or leave the thread behind after `timeout_s`."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def wake(self) -> None:
        """There may be work. The caller holds `lock`."""
        self._is_woken = True
        self._changed.notify()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` on the thread before its next step. Never done if the thread has ended. Takes `lock`."""
        done: Future[T] = Future()
        with self._changed:
            self._calls.append(lambda: _fulfil(work, done))
            self.wake()
        return done

    def progress(self) -> Progress:
        busy_since = self._busy_since
        if busy_since is None:
            return Progress(self.steps, 0.0, 0.0)
        return Progress(self.steps, time.monotonic() - busy_since, self.predicted_s)

    def _run(self) -> None:
        try:
            self._work()
        except Exception:
            if self._is_stopping:
                return
            try:
                log.exception("the engine failed between two steps; this process ends")
            finally:
                self.on_failure()

    def _work(self) -> None:
        while not self._is_stopping:
            self._is_woken = False
            while self._calls:
                self._calls.popleft()()
            self._busy_since = time.monotonic()
            if self._step():
                self.steps += 1
            else:
                self._busy_since = None
                self._sleep()

    def _sleep(self) -> None:
        with self._changed:
            deadline = self._next_deadline()
            timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            self._changed.wait_for(lambda: self._is_woken or self._is_stopping, timeout)
