"""The door to one model: which requests are inside, and how many of their choices wait. Lives on the asyncio thread.

While the gateway drains: nothing new; what is inside ends, or is cut off.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gateway.errors import not_ready, overloaded
from gateway.router.engine_client import Admitted

DRAINING = "the gateway is draining: it is about to stop and takes no new requests"
CUT_OFF = "the gateway stopped before the answer was complete; try again"


class Admission:
    """Counts requests inside, and choices that wait for a model, an adapter or a place: `max_queue` bounds these."""

    def __init__(
        self,
        max_queue: int,
        is_draining: Callable[[], bool] = lambda: False,
        on_empty: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_empty`: called when the last request is over."""
        self.is_draining = is_draining
        self.num_inside = 0
        self.num_waiting = 0  # choices
        self._max_queue = max_queue
        self._on_empty = on_empty
        self._cuttable = set[asyncio.Task[Any]]()  # tasks that wait for workers, rather than for their clients
        self._is_cut_off = False

    @contextmanager
    def inside(self, num_choices: int) -> Iterator[Admitted]:
        """Let a request in, as EngineClient.admit. Where none wait, any number of choices is let in."""
        if self.is_draining():
            raise not_ready(DRAINING)
        if self.num_waiting and self.num_waiting + num_choices > self._max_queue:
            raise overloaded(_describe_full(self.num_waiting, num_choices, self._max_queue))
        admitted = Admitted(num_choices)
        self.num_inside += 1
        self.num_waiting += num_choices
        try:
            yield admitted
        finally:
            self.num_inside -= 1
            self.num_waiting -= admitted.num_unplaced  # they never came
            admitted.num_unplaced = 0
            if not self.num_inside:
                self._on_empty()

    @contextmanager
    def waits(self, admitted: Admitted | None = None) -> Iterator[None]:
        """Count a choice while it waits. `admitted`: of its request, the first time: it has counted there until now."""
        if admitted is not None and admitted.num_unplaced:
            admitted.num_unplaced -= 1
        else:
            self.num_waiting += 1
        try:
            with self.cuttable():
                yield
        finally:
            self.num_waiting -= 1

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """Let `cut_off` end a wait for workers. Raises ApiError, 503, when it has, before or meanwhile."""
        if self._is_cut_off:
            raise not_ready(CUT_OFF)
        task = asyncio.current_task()
        assert task is not None
        self._cuttable.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._is_cut_off and not task.uncancel():  # else its client left as well
                raise not_ready(CUT_OFF) from None
            raise
        finally:
            self._cuttable.remove(task)

    def cut_off(self) -> None:
        """End what is still inside with a 503, for good."""
        self._is_cut_off = True
        for task in self._cuttable:
            task.cancel()


def _describe_full(num_waiting: int, num_choices: int, max_queue: int) -> str:
    if num_choices == 1:
        return f"{num_waiting} requests are waiting, the most allowed by --max-queue; try again"
    limit = f"--max-queue, which is {max_queue}"
    return f"{num_waiting} requests are waiting, and {num_choices} more exceed {limit}; try again"
