"""The engine thread: woken, timed and stopped, and never asleep while there is work."""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.thread import EngineThread, call_in_thread

PATIENCE_S = 30.0  # longer than any wait here; a test that reaches it fails


def wait_until(holds: threading.Event) -> None:
    assert holds.wait(PATIENCE_S)


@contextmanager
def running(
    step: Callable[[], bool], next_deadline: Callable[[], float | None] = lambda: None
) -> Iterator[EngineThread]:
    thread = EngineThread(step, next_deadline)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop(PATIENCE_S)
        assert not thread._thread.is_alive()


def test_no_wake_is_lost_under_stress() -> None:
    """Four threads add jobs at random moments of the loop; all are done, although each job wakes it only once."""
    jobs: deque[int] = deque()
    done: list[int] = []
    looked, finished = threading.Event(), threading.Event()

    def step() -> bool:
        with thread.lock:
            if not jobs:
                looked.set()
                return False
            done.append(jobs.popleft())
            if len(done) == 2000:
                finished.set()
        return True

    def produce(first: int) -> None:
        for job in range(first, first + 500):
            with thread.lock:
                jobs.append(job)
                thread.wake()
            if job % 3 == 0:
                looked.clear()
                looked.wait(0.001)  # sometimes lets the loop fall asleep

    producers = [threading.Thread(target=produce, args=(number * 500,)) for number in range(4)]
    thread = EngineThread(step)
    thread.start()
    for producer in producers:
        producer.start()
    wait_until(finished)
    for producer in producers:
        producer.join(PATIENCE_S)
    thread.stop(PATIENCE_S)
    assert sorted(done) == list(range(2000))
    assert thread.progress().steps == 2000


def test_a_wake_in_a_step_that_has_looked_already_is_not_lost() -> None:
    looked_again, looks = threading.Event(), [0]

    def step() -> bool:
        looks[0] += 1
        if looks[0] == 1:
            with thread.lock:  # as another thread would, after this step found nothing and before it reports so
                thread.wake()
        else:
            looked_again.set()
        return False

    thread = EngineThread(step)
    thread.start()
    wait_until(looked_again)
    thread.stop(PATIENCE_S)


@pytest.mark.parametrize("wait_s", [0.05, -1.0])
def test_a_deadline_ends_the_sleep_without_a_wake(wait_s: float) -> None:
    due = time.monotonic() + wait_s
    deadlines: list[float | None] = [due]
    fired = threading.Event()

    def step() -> bool:
        if deadlines[0] is not None and time.monotonic() >= deadlines[0]:
            deadlines[0] = None
            fired.set()
        return False

    with running(step, lambda: deadlines[0]):
        wait_until(fired)
    assert time.monotonic() >= due


def test_stop_comes_after_the_step_under_way() -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def step() -> bool:
        entered.set()
        leave.wait(PATIENCE_S)
        left.set()
        return True

    thread = EngineThread(step)
    thread.start()
    wait_until(entered)
    thread.stop(0.01)  # gives up waiting: the step is long
    assert not left.is_set()
    leave.set()
    wait_until(left)
    thread.stop(PATIENCE_S)
    assert not thread._thread.is_alive()
    assert thread.progress().steps == 1


def test_a_process_ends_with_its_engine_even_if_nothing_takes_its_words() -> None:
    """Otherwise it would remain as a stuck worker."""
    script = "import time; from worker.thread import EngineThread; EngineThread(lambda: 1 / 0).start(); time.sleep(600)"
    with Path("/dev/full").open("w") as full:
        outs: tuple[Any, ...] = (subprocess.PIPE, full)
        begun = [subprocess.Popen([sys.executable, "-c", script], stdout=out, stderr=full, text=True) for out in outs]
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in begun]
    assert [process.returncode for process in begun] == [1, 1] and "ZeroDivisionError" in said[0]


def test_a_step_that_outlasts_its_stop_may_fail_unheard() -> None:
    entered, leave, told = threading.Event(), threading.Event(), threading.Event()

    def step() -> bool:
        entered.set()
        leave.wait(PATIENCE_S)
        raise RuntimeError("Event loop is closed")

    thread = EngineThread(step, on_failure=told.set)
    thread.start()
    wait_until(entered)
    thread.stop(0.01)
    leave.set()
    thread.stop(PATIENCE_S)
    assert not thread._thread.is_alive()
    assert not told.is_set()


def test_progress_tells_how_long_a_step_takes_and_nothing_when_idle() -> None:
    entered, leave, idle = threading.Event(), threading.Event(), threading.Event()
    has_work = [True]

    def step() -> bool:
        if has_work:
            has_work.clear()
            entered.set()
            leave.wait(PATIENCE_S)
            return True
        return False

    def next_deadline() -> None:
        idle.set()  # called just before it sleeps

    with running(step, next_deadline) as thread:
        wait_until(entered)
        first = thread.progress().step_age_s
        assert 0 < first <= thread.progress().step_age_s
        assert thread.progress().steps == 0
        leave.set()
        wait_until(idle)
        assert thread.progress().step_age_s == 0
        assert thread.progress().steps == 1


def test_a_call_in_a_thread_leaves_no_helpers_of_openmp_behind() -> None:
    def count_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = count_threads()
    assert call_in_thread(lambda: float(torch.ones(1 << 22).sum())) == 1 << 22
    deadline = time.monotonic() + PATIENCE_S
    while count_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # they end after the thread that they served
    assert count_threads() <= before
    with pytest.raises(ValueError, match="told"):
        call_in_thread(lambda: (_ for _ in ()).throw(ValueError("told")))
