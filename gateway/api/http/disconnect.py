"""Cancels work when its HTTP client disconnects. Knows ASGI's `receive`, not the work."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")

_CLEANUP_S = 10.0  # for cancelled work to clean up; after that we do not wait for it


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects, cancels `work` and raises ClientDisconnect.

    The body must have been read. `work` is cancelled once, so its cleanup may await (unlike in anyio's cancel scopes).
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone}, timeout=_CLEANUP_S)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
