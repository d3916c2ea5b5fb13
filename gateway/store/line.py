"""A database that is asked from the event loop: one call after the other, in a thread of its own."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import structlog

from gateway.errors import ApiError
from gateway.store.database import CALL_S, Database, StoreError

_log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")
MAX_WAITING = 256  # calls; more are refused


class Line:
    """A thread with one connection to the database, which makes its calls in order."""

    def __init__(self, place: str | Path, name: str) -> None:
        """`place`: as in Database. `name`: of the thread."""
        self._place = place
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._database: Database | None = None
        self._num_waiting = 0

    async def call(self, method: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Raises StoreError, after 2 CALL_S at the latest; what was begun may then still be done."""
        if self._num_waiting >= MAX_WAITING:
            raise StoreError(f"{MAX_WAITING} calls wait already")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(2 * CALL_S):
                work = partial(self._call, method, *args, **named)
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError as error:
            raise StoreError(f"no answer within {2 * CALL_S:g} s") from error
        finally:
            self._num_waiting -= 1

    async def ask(self, method: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        """As `call`, for a client whose request needs it: raises ApiError."""
        with for_clients():
            return await self.call(method, *args, **named)

    def _call(self, method: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        if self._database is None:
            self._database = Database(self._place)
        return method(self._database, *args, **named)

    def close(self) -> None:
        """Does not wait for a call that hangs."""
        if self._database is not None:
            self._thread.submit(self._database.close)
        self._thread.shutdown(wait=False)


@contextmanager
def for_clients() -> Iterator[None]:
    """In this block, which a client's request needs, ApiError is raised instead of StoreError."""
    try:
        yield
    except StoreError as error:
        raise unavailable(error) from error


def unavailable(error: StoreError) -> ApiError:
    """The error for a client whose request cannot be answered without the store."""
    _log.warning("a request needs the store of answers, which failed", reason=str(error))
    why = "the store of answers does not answer; try again in a moment"
    return ApiError(503, why, None, "store_unavailable", retry_after_s=1)
