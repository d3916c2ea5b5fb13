"""The watch of the event loop: long steps are counted and logged with their place, others are not."""

import asyncio
import gc
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gateway.loop_watch import MAX_STEP_S, PERIOD_S, LoopWatch, walk_at_once

RUNNERS = [asyncio.run, uvloop.run]


def burn(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def call_c() -> None:
    """One call that keeps the interpreter's lock, as long on a fast core as on a slow one."""
    until = time.thread_time() + 2 * MAX_STEP_S
    next(filter(until.__lt__, iter(time.thread_time, None)))


async def watched(work: Callable[[], None], num: int = 1) -> tuple[int, list[str]]:
    """How many long steps `num` steps of `work` are, and the places in the log."""
    registry = CollectorRegistry()
    watch = LoopWatch(registry)
    with capture_logs() as logs:
        watch.start()
        await asyncio.sleep(2 * PERIOD_S)
        for _ in range(num):
            work()
            await asyncio.sleep(0)
        await asyncio.sleep(4 * PERIOD_S)
        watch.close()
    assert registry.get_sample_value("baton:event_loop_long_steps_total") == watch.num_long
    return watch.num_long, [line["where"] for line in logs if "took long" in line["event"]]


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("work", [lambda: burn(2 * MAX_STEP_S), call_c])
def test_a_long_step_is_counted_and_located(run: Callable[..., Any], work: Callable[[], None]) -> None:
    num_long, places = run(watched(work))
    assert num_long == 1
    assert ("burn" in places[0]) or ("call_c" in places[0])


@pytest.mark.parametrize("run", RUNNERS)
def test_many_short_steps_are_not_one_long(run: Callable[..., object]) -> None:
    assert run(watched(lambda: burn(MAX_STEP_S / 5), 30)) == (0, [])


def test_waiting_is_no_step() -> None:
    """Wall time alone, such as of a machine that is busy, does not count."""
    assert asyncio.run(watched(lambda: time.sleep(2 * MAX_STEP_S))) == (0, [])


def test_an_idle_loop_is_left_alone() -> None:
    async def wait() -> int:
        watch = LoopWatch(CollectorRegistry())
        watch.start()
        await asyncio.sleep(30 * PERIOD_S)
        watch.close()
        return watch._num_turns

    assert asyncio.run(wait()) < 10


def test_nothing_is_collected_while_frames_of_another_thread_are_walked() -> None:
    """CPython 3.11 collects when it makes a frame's object: other threads run meanwhile, and a frame may end."""
    collected_in = set[str]()

    def note(phase: str, info: Any) -> None:
        collected_in.update(frame.name for frame in traceback.extract_stack())

    async def look() -> None:
        watch = LoopWatch(CollectorRegistry())
        watch.start()
        burn(10 * PERIOD_S)
        watch.close()

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    gc.callbacks.append(note)
    try:
        asyncio.run(look())
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert collected_in and "walk_at_once" not in collected_in


def test_nothing_is_collected_while_the_innermost_frame_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled, find = set[bool](), sys._current_frames

    def note() -> dict[int, FrameType]:
        enabled.add(gc.isenabled())
        return find()

    async def look() -> None:
        watch = LoopWatch(CollectorRegistry())
        watch.start()
        burn(10 * PERIOD_S)
        watch.close()

    monkeypatch.setattr(sys, "_current_frames", note)
    asyncio.run(look())
    assert enabled == {False} and gc.isenabled()


def test_a_stack_is_walked_whole_and_at_once() -> None:
    def deep(left: int) -> list[FrameType]:
        return deep(left - 1) if left else walk_at_once(sys._getframe())

    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
    assert deep(50)[51:] == stack


def test_an_unending_step_is_logged_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.loop_watch.HUNG_S", 2 * MAX_STEP_S)
    seen = list[str]()

    def hang() -> None:
        while not seen:
            burn(PERIOD_S)
            seen.extend(line["event"] for line in logs if "does not end" in line["event"])

    with capture_logs() as logs:
        asyncio.run(asyncio.wait_for(_hang(hang), 20))
    assert len(seen) == 1


async def _hang(hang: Callable[[], None]) -> None:
    watch = LoopWatch(CollectorRegistry())
    watch.start()
    await asyncio.sleep(0)
    hang()
    watch.close()
