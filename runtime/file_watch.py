"""Notices that files were changed or replaced: keys, certificates."""

import asyncio
from collections.abc import Callable
from pathlib import Path

LOOK_S = 1.0  # between two looks: orchestrators replace links, which systems report differently


class FileWatch:
    """Watches some files from the moment it is made."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._look()

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Calls `on_change` in a thread after each change, until it is cancelled. It must not raise."""
        while True:
            await asyncio.sleep(LOOK_S)
            found = await asyncio.to_thread(self._look)
            if found != self._seen:
                self._seen = found
                await asyncio.to_thread(on_change)

    def _look(self) -> list[tuple[int, ...]]:
        """Values of each file that differ once the file does; empty for a file that is not there."""
        return [self._describe(path) for path in self._paths]

    @staticmethod
    def _describe(path: Path) -> tuple[int, ...]:
        try:
            stat = path.stat()
        except OSError:
            return ()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
