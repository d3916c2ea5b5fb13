"""Where requests wait for the queue's decisions. Lives on the asyncio thread; queue.py decides."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.ring.generation import Admitted
from gateway.ring.queue import Queue, Waiter
from gateway.ring.reasons import Reason, as_error
from gateway.ring.request_machine import Request


class Admission:
    """Asks the queue at each change, and wakes those whose wait is over."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._decided: dict[Waiter, asyncio.Future[None]] = {}
        queue.on_change = self.pump

    def pump(self) -> None:
        """Something changed, or a worker answered, or was silent: so time counts."""
        for waiter in self.queue.decide(time.monotonic()):
            decided = self._decided[waiter]
            if not decided.done():  # else the request was cancelled this very moment, and leaves
                decided.set_result(None)

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[Admitted]:
        """As Ring.admit."""
        admitted = self.queue.admit(num_choices)
        if isinstance(admitted, Reason):
            raise as_error(admitted)
        try:
            yield admitted
        finally:
            self.queue.dismiss(admitted)

    async def wait(self, request: Request) -> Waiter:
        """Until an admitted request has places, or a reason why not. The caller has it leave the queue in the end."""
        waiter = self.queue.join(request)
        decided = self._decided[waiter] = asyncio.get_running_loop().create_future()
        timeout_s = request.deadline - time.monotonic()
        self.pump()
        try:
            # not wait_for, which before Python 3.12 swallows a cancellation that comes with the decision
            async with asyncio.timeout(timeout_s):
                await decided
        except TimeoutError:
            self.queue.leave(waiter)
            waiter.places, waiter.reason = None, Reason("not ready", f"no worker had room within {timeout_s:.0f} s")
        except asyncio.CancelledError:
            self.queue.leave(waiter)
            raise
        finally:
            del self._decided[waiter]
        return waiter
