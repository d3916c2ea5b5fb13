"""Runs work that would block the event loop on a bounded number of threads with a bounded queue."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.errors import overloaded

T = TypeVar("T")


class Offload:
    """Runs cheap work directly and expensive work on a thread."""

    def __init__(self, cheap_chars: int, num_threads: int, max_waiting: int, timeout_s: float) -> None:
        self._cheap_chars = cheap_chars
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenise")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`. `num_chars`: its cost. Raises ApiError 429 if too many wait or it is slow."""
        if num_chars <= self._cheap_chars:
            return work()
        if self._num_waiting >= self._max_waiting:
            raise overloaded(f"{self._num_waiting} long prompts are waiting to be tokenised; try again in a moment")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise overloaded(f"the prompt was not tokenised within {self._timeout_s:g} s; try again later") from error
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Drops waiting work; does not wait for running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
