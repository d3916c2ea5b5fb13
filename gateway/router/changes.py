"""Passes on that something has changed: any number of changes, one look at all of them, soon."""

import asyncio
from collections.abc import Callable

import structlog

log = structlog.get_logger()


class Changes:
    """Owners `mark`, followers look: from the event loop, so that no follower runs while an owner changes."""

    def __init__(self) -> None:
        self._followers: list[Callable[[], None]] = []
        self._is_marked = False

    def follow(self, look: Callable[[], None]) -> None:
        """Call `look` after changes, in the order in which followers came."""
        self._followers.append(look)

    def mark(self) -> None:
        """Something changed that followers may have to act on."""
        if not self._is_marked:
            self._is_marked = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_marked = False
        for look in self._followers:
            try:
                look()
            except Exception:  # the others are to see the change all the same
                log.exception("a change was not followed")
