"""Passes on that something has changed: any number of changes, one look at all of them, soon. On the asyncio thread."""

import asyncio
from collections.abc import Callable

import structlog

log = structlog.get_logger()


class Changes:
    """Owners `mark`; then followers look, in the order in which they came, and waiting tasks see what came of it.

    Both run from the event loop, so that none of them runs while an owner changes.
    """

    def __init__(self) -> None:
        self._followers: list[Callable[[], None]] = []
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._is_marked = False

    def follow(self, look: Callable[[], None]) -> None:
        """Call `look` after changes."""
        self._followers.append(look)

    def mark(self) -> None:
        """Note that something changed that followers may have to act on."""
        if not self._is_marked:
            self._is_marked = True
            asyncio.get_running_loop().call_soon(self._look)

    async def until(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until it is, which a change brings about; returns False where the time is over first.

        Raises what `is_over` raises.
        """
        if is_over():
            return True
        woken = asyncio.get_running_loop().create_future()
        self._waiting[woken] = is_over
        try:
            # not wait_for, which before Python 3.12 swallows a cancellation that comes with the result
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            return False
        finally:
            del self._waiting[woken]
        return True

    def _look(self) -> None:
        self._is_marked = False
        for look in self._followers:
            try:
                look()
            except Exception:  # the others are to see the change all the same
                log.exception("a change was not followed")
        for woken, is_over in self._waiting.items():
            try:
                if not woken.done() and is_over():
                    woken.set_result(None)
            except Exception as error:  # the others are to go on all the same
                woken.set_exception(error)
