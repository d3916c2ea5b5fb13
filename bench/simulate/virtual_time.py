"""An asyncio loop in virtual time and channels within one process: simulations run the services' own coroutines."""

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

import grpc


class VirtualLoop:
    """Runs callbacks as actions of a simulation, which owns the time and the order of everything."""

    def __init__(self, clock: Callable[[], float], after: Callable[[float, Callable[[], None]], None]) -> None:
        """`after(seconds, action)`: has the simulation run `action` then, or never if this process is dead by then."""
        self.time = clock
        self._me: Any = self  # what of an event loop simulations need
        self._after = after
        self._soon: dict[asyncio.Handle, None] = {}  # in order

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._me, context)
        self._soon[handle] = None
        self._after(0.0, lambda: self._run(handle))
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._me, context)
        if when < float("inf"):
            self._after(max(when - self.time(), 0.0), lambda: self._run(handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def run(self, action: Callable[[], object]) -> None:
        """Run `action` at once, as a callback of this loop."""
        before = events._get_running_loop()
        events._set_running_loop(self._me)
        try:
            action()
        finally:
            events._set_running_loop(before)

    def _run(self, handle: asyncio.Handle) -> None:
        self._soon.pop(handle, None)
        if not handle.cancelled():
            self.run(handle._run)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._me)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self._me, **options)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer does nothing when its time comes."""

    def kill(self) -> None:
        """End all tasks at once, as if the process had died: only their own objects see it."""
        # What was about to run may be all that a task waits for, which then would never end.
        ready = deque[Callable[[], None]](partial(self._run, handle) for handle in self._soon)
        self._after = lambda _seconds, action: ready.append(action)
        for task in asyncio.all_tasks(self._me):
            task.cancel()
        while ready:
            ready.popleft()()

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback's exception ends the simulation."""
        if "handle" in context:
            raise context["exception"]


class MemoryChannel:
    """Like a gRPC channel, for generated stubs: a verb of the service is the method of that name here.

    `async def Verb(self, request, timeout)`, or an async generator where the answer is a stream. They raise `refusal`s.
    """

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        verb: Callable[..., Any] = getattr(self, path.rpartition("/")[2], _unimplemented)
        return verb

    unary_stream = unary_unary

    async def close(self) -> None:
        pass


def _unimplemented(*_: object, **__: object) -> None:
    raise NotImplementedError


def refusal(code: grpc.StatusCode, detail: str, *metadata: tuple[str, str]) -> grpc.aio.AioRpcError:
    """As a stub raises it. `metadata`: trailing."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), detail)
