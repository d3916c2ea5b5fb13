"""Runs work that would block the event loop on a bounded number of threads with a bounded queue, fairly by key."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from gateway.errors import overloaded
from gateway.fair_turns import FairTurns
from gateway.shares import Shared

CHEAP_CHARS = 4096  # tokenised in 1-3 ms; longer text goes to a thread
THREADS = 3  # of which one key has two at most
MAX_WAITING = 64  # long prompts; more are refused with 429
TIMEOUT_S = 30.0

T = TypeVar("T")
Check = Callable[[], None]  # work calls it between its parts: it raises if the request is over


class _OverError(Exception):
    """Nobody waits for the work any more."""


class Offload:
    """Runs cheap work directly and expensive work on a thread."""

    def __init__(self) -> None:
        self.loop_turns = FairTurns(1)  # for LoopTurn
        self._waiting = Shared(MAX_WAITING)
        self._turns = FairTurns(THREADS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")

    async def run(self, num_chars: int, work: Callable[[Check], T], owner: str = "") -> T:
        """Returns the result of `work`. `num_chars`: its cost; `owner`: as in Shared.

        Raises ApiError 429 if too many wait or it is slow.
        """
        if num_chars <= CHEAP_CHARS:
            return work(lambda: None)
        if not self._waiting.has_room(owner):
            raise overloaded(f"{self._waiting.total} long prompts are waiting to be tokenised; try again in a moment")
        with self._waiting.held(owner):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._turns.take(owner)
                    return await self._run(work, owner)
            except TimeoutError as error:
                raise overloaded(f"the prompt was not tokenised within {TIMEOUT_S:g} s; try again later") from error

    async def _run(self, work: Callable[[Check], T], owner: str) -> T:
        """The turn is given back when the thread is free, also if the request ends before."""
        loop, is_over = asyncio.get_running_loop(), threading.Event()

        def check() -> None:
            if is_over.is_set():
                raise _OverError

        def run() -> T:
            try:
                check()
                return work(check)
            finally:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._turns.give_back, owner)

        try:
            return await asyncio.shield(loop.run_in_executor(self._threads, run))
        finally:
            is_over.set()

    def close(self) -> None:
        """Drops waiting work; does not wait for running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
