"""Has workers of both roles change them, as roles.py decides. Lives on the asyncio thread."""

import asyncio
import time
from collections.abc import Callable

import grpc
import structlog

from gateway.router.fleet import Fleet
from gateway.router.queue import Queue
from gateway.scaling.roles import Change, RoleBalance, Seen
from protos import worker_pb2

log = structlog.get_logger()
LOOK_S = 1.0
CALL_S = 5.0  # for one order


class RoleKeeper:
    """Owns the balance of one model's workers."""

    def __init__(
        self, fleet: Fleet, queue: Queue, name: str, decides: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`name`: of this gateway, for workers. `decides`: whether it is this gateway that does, of several."""
        self._fleet = fleet
        self._queue = queue
        self._name = name
        self._decides = decides
        self._clock = clock
        self._balance = RoleBalance()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            queue = self._queue
            seen = Seen(queue.num_tokens_placed, queue.num_answering, queue.num_tokens_waiting, queue.num_waiting)
            changes = self._balance.look(queue.views(), seen, self._clock())
            if changes and self._decides():
                await asyncio.gather(*map(self._order, changes))

    async def _order(self, change: Change) -> None:
        worker = next((one for one in self._fleet.workers() if one.incarnation == change.incarnation), None)
        if worker is None:
            return
        wanted = worker_pb2.SetRolesRequest(roles=change.roles, caller=self._name)
        try:
            await worker.order(lambda stub: stub.SetRoles(wanted, timeout=CALL_S))
        except grpc.aio.AioRpcError as error:  # another one's order counts there, or it is gone: a later look sees
            reason = f"{error.code().name}: {error.details()}"
            log.warning("a worker did not change its roles", address=worker.address, reason=reason)
            return
        log.info("roles changed", address=worker.address, takes=" and ".join(change.roles))
