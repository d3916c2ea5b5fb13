"""Runs work that would block the event loop on a bounded number of threads with a bounded queue."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.errors import overloaded

CHEAP_CHARS = 4096  # tokenised in 1-3 ms; longer text goes to a thread
THREADS = 2
MAX_WAITING = 64  # long prompts; more are refused with 429
TIMEOUT_S = 30.0

T = TypeVar("T")


class Offload:
    """Runs cheap work directly and expensive work on a thread."""

    def __init__(self) -> None:
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`. `num_chars`: its cost. Raises ApiError 429 if too many wait or it is slow."""
        if num_chars <= CHEAP_CHARS:
            return work()
        if self._num_waiting >= MAX_WAITING:
            raise overloaded(f"{self._num_waiting} long prompts are waiting to be tokenised; try again in a moment")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise overloaded(f"the prompt was not tokenised within {TIMEOUT_S:g} s; try again later") from error
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Drops waiting work; does not wait for running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
