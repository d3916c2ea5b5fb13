"""Work that lasts as long as its owner, begun again where it fails, and work that outlives who began it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

PAUSE_S = 0.2  # before work that failed begins again
log = structlog.get_logger()

T = TypeVar("T")
_running = set[asyncio.Task[Any]]()


def run_to_end(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts a task and keeps it until it ends: the event loop alone would let it be collected while it waits."""
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


async def keep_running(
    work: Callable[[], Coroutine[Any, Any, None]],
    what: str,
    on_bug: Callable[[BaseException], None] = lambda _bug: None,
    **facts: str,
) -> None:
    """Run `work` until it returns or this task is cancelled.

    `on_bug` is called each time that it fails; the log gets a bug once, as `what` with `facts`.
    """
    task, logged = asyncio.current_task(), ""
    while True:
        try:
            return await work()
        except (Exception, asyncio.CancelledError) as bug:
            if isinstance(bug, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise  # else gRPC cancelled a call
            if repr(bug) != logged:
                logged = repr(bug)
                log.exception(f"{what} failed and is begun again", **facts)
            on_bug(bug)
        await asyncio.sleep(PAUSE_S)
