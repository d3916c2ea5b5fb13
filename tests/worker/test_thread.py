"""The engine thread: woken, timed and stopped, and never asleep while there is work."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import ForkedCode
from tests.support.live import START_S
from worker.thread import EngineThread, Progress, call_in_thread

PATIENCE_S = 30.0  # longer than any wait here; a test that reaches it fails


class Step:
    """A step that waits in its middle until it may leave, then finds no more work or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.entered, self.leave, self.left = threading.Event(), threading.Event(), threading.Event()
        self._error = error

    def __call__(self) -> bool:
        if self.left.is_set():
            return False
        self.entered.set()
        self.leave.wait(PATIENCE_S)
        self.left.set()
        if self._error is not None:
            raise self._error
        return True


@contextmanager
def running(thread: EngineThread) -> Iterator[EngineThread]:
    thread.start()
    try:
        yield thread
    finally:
        thread.stop(PATIENCE_S)
        assert not thread._thread.is_alive()


def wait_until(holds: threading.Event) -> None:
    assert holds.wait(PATIENCE_S)


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
    with running(thread):
        wait_until(looked_again)


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

    with running(EngineThread(step, lambda: deadlines[0])):
        wait_until(fired)
    assert time.monotonic() >= due


@pytest.mark.parametrize("error", [None, RuntimeError("Event loop is closed")])
def test_stop_comes_after_the_step_under_way_whose_failure_is_then_unheard(error: Exception | None) -> None:
    step, failed = Step(error), threading.Event()
    with running(EngineThread(step, on_failure=failed.set)) as thread:
        wait_until(step.entered)
        thread.stop(0.01)  # gives up waiting: the step is long
        assert not step.left.is_set()
        step.leave.set()
    assert step.left.is_set() and not failed.is_set()
    assert thread.progress().steps == (error is None)


def test_progress_tells_how_long_a_step_takes_and_nothing_when_idle() -> None:
    step, idle = Step(), threading.Event()
    with running(EngineThread(step, idle.set)) as thread:  # called just before it sleeps
        wait_until(step.entered)
        first = thread.progress().step_age_s
        assert 0 < first <= thread.progress().step_age_s and thread.progress().steps == 0
        step.leave.set()
        wait_until(idle)
        assert (thread.progress().step_age_s, thread.progress().steps) == (0, 1)


def test_calls_run_on_the_thread_between_steps_and_say_what_came_of_them() -> None:
    step = Step()
    with running(EngineThread(step)) as thread:
        wait_until(step.entered)
        done = thread.call(lambda: (threading.get_ident(), step.left.is_set()))
        failed = thread.call(lambda: 1 / 0)
        step.leave.set()
        assert done.result(PATIENCE_S) == (thread._thread.ident, True)
        with pytest.raises(ZeroDivisionError):
            failed.result(PATIENCE_S)
        assert thread.call(lambda: True).result(PATIENCE_S), "though it slept"


def test_a_process_ends_with_its_engine_even_if_nothing_takes_its_words() -> None:
    """Otherwise it would remain as a stuck worker."""
    script = "import time; from worker.thread import EngineThread; EngineThread(lambda: 1 / 0).start(); time.sleep(600)"
    with Path("/dev/full").open("w") as full:
        outs: tuple[Any, ...] = (subprocess.PIPE, full)
        begun = [ForkedCode([sys.executable, "-c", script], stdout=out, stderr=full, text=True) for out in outs]
        said = [process.communicate(timeout=START_S)[0] for process in begun]
    assert [process.returncode for process in begun] == [1, 1] and "ZeroDivisionError" in said[0]


def test_a_process_whose_engine_is_stuck_ends_though_all_else_waits_for_it() -> None:
    script = """
import time; from worker.thread import EngineThread
def step():
    with thread.lock:
        time.sleep(600)
thread = EngineThread(step); thread.start(); thread.end_when_stuck(0.05, 3)
while True:
    with thread.lock:
        time.sleep(0.01)
"""
    pipe = subprocess.PIPE
    with ForkedCode([sys.executable, "-c", script], stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        said, _ = process.communicate(timeout=START_S)
    assert process.returncode == 1 and "(--stall-s 0.05)" in said


@pytest.mark.parametrize(
    ("looks", "num_looks"),
    [
        ([(7, 80.0), (7, 89.0), (7, 91.0), (7, 94.0), (7, 97.0)], 4),  # at three times 30 s, and once more
        ([(7, 91.0), (8, 0.1), (8, 91.0), (8, 94.0)], 4),  # it was frozen with the process, and went on
        ([(7, 91.0), (7, 0.0), (7, 91.0), (8, 91.0), (9, 91.0)], 0),
    ],
)
def test_only_a_step_that_is_still_stuck_at_a_second_look_ends_the_process(
    looks: list[tuple[int, float]], num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_after, seen = list[int](), list[tuple[int, float]]()

    def look() -> Progress:
        seen.append(looks[len(seen)])
        return Progress(*seen[-1], 0.1)

    def pause(_seconds: float) -> None:
        if len(seen) == len(looks):
            raise EOFError

    thread = EngineThread(lambda: False, on_failure=lambda: ended_after.append(len(seen)))
    monkeypatch.setattr(thread, "progress", look)
    with suppress(EOFError):
        thread._watch(30.0, 3, pause)
    assert ended_after == [num_looks] * bool(num_looks)


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
