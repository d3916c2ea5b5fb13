"""Which requests are inside. While the gateway drains: nothing new; what is inside ends, or is cut off."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gateway.errors import not_ready

DRAINING = "the gateway is draining: it is about to stop and takes no new requests"
CUT_OFF = "the gateway stopped before the answer was complete; try again"


class DrainGate:
    """Counts the requests inside, and lets in no more once the gateway drains. Lives on the asyncio thread."""

    def __init__(self) -> None:
        self.is_draining: Callable[[], bool] = lambda: False  # set by the owner
        self.on_empty: Callable[[], None] = lambda: None  # called when the last request is over
        self._num_inside = 0
        self._waiting = set[asyncio.Task[Any]]()  # tasks that wait for workers, rather than for their clients
        self._is_cut_off = False

    def __len__(self) -> int:
        return self._num_inside

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around one request. Raises ApiError, 503, while draining."""
        if self.is_draining():
            raise not_ready(DRAINING)
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self.on_empty()

    def cut_off(self) -> None:
        """End what is still inside with a 503, for good."""
        self._is_cut_off = True
        for task in self._waiting:
            task.cancel()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for workers. Raises ApiError, 503, when cut off before or meanwhile."""
        if self._is_cut_off:
            raise not_ready(CUT_OFF)
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._is_cut_off and not task.uncancel():  # else its client left as well
                raise not_ready(CUT_OFF) from None
            raise
        finally:
            self._waiting.remove(task)
