"""Work that is begun again where it fails."""

import asyncio

import pytest
from structlog.testing import capture_logs

from runtime import tasks
from runtime.tasks import keep_running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)


async def test_work_begins_again_whatever_ends_it_and_a_bug_is_logged_once() -> None:
    failures: list[BaseException] = [ValueError("a"), ValueError("a"), asyncio.CancelledError(), ValueError("b")]
    bugs: list[BaseException] = []

    async def work() -> None:
        await asyncio.sleep(0)
        if len(bugs) < len(failures):
            raise failures[len(bugs)]

    with capture_logs() as logs:
        await keep_running(work, "some work", bugs.append, address="x")
    assert bugs == failures
    assert [(one["event"], one["address"]) for one in logs] == [("some work failed and is begun again", "x")] * 3


async def test_work_ends_when_it_is_cancelled() -> None:
    task = asyncio.create_task(keep_running(lambda: asyncio.sleep(1000), "some work"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
