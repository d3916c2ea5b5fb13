"""The watch of the event loop: long steps are counted and logged with their place, others are not."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gateway.loop_watch import MAX_STEP_S, PERIOD_S, LoopWatch

RUNNERS = [asyncio.run, uvloop.run]
DEEP = "[" + ",".join(["[[],{}]"] * 1_000_000) + "]"


def burn(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def call_c() -> None:
    """One call that keeps the interpreter's lock."""
    json.loads(DEEP)


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
