"""The answers of one line of a batch: each waits until it may run, however many the line asks for."""

from asyncio import CancelledError, Future, get_running_loop
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class LineTurns:
    """How many answers of a line may run at once: one from its start, more as the runner allows."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end`: called when the line needs one less than it was allowed; never for the first."""
        self.num_allowed = 1
        self._num_running = 0
        self._waiting: deque[Future[None]] = deque()
        self._on_end = on_end

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def allow(self) -> None:
        """Lets one answer run that waits."""
        self.num_allowed += 1
        self._num_running += 1
        self._leave()

    async def hold(self, answer: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yields the answer's parts, once it may run."""
        async with aclosing(answer):
            await self._enter()
            try:
                async for part in answer:
                    yield part
            finally:
                self._leave()

    async def _enter(self) -> None:
        if self._num_running < self.num_allowed:
            self._num_running += 1
            return
        turn: Future[None] = get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._num_running -= 1
        if self.num_allowed > 1:
            self.num_allowed -= 1
            self._on_end()
