"""The parts that each role builds on, and a role's interface to the process that runs it."""

from dataclasses import dataclass

import grpc

from engine.compose import FullEngine
from protos import kv_pb2
from runtime.lifecycle import Shutdown
from runtime.trust import Trust
from worker.loop import WorkerLoop
from worker.metrics import WorkerMetrics
from worker.peers.other_ranks import OtherRanks
from worker.peers.pools import RankedPool
from worker.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Worker:
    """The parts of a worker that its role builds on."""

    engine: FullEngine
    me: kv_pb2.Peer
    scheduler: Scheduler
    shutdown: Shutdown
    trust: Trust
    context_tokens: int
    steps_ahead: int  # launched before the last one is collected
    threads: int  # CPU threads that compute steps; 0 on a GPU
    pools: list[RankedPool]  # pages and, of a model with states, slots
    others: OtherRanks


class Role:
    """The parts of one role. Lives on the asyncio thread."""

    loop: WorkerLoop
    metrics: WorkerMetrics

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the role's services."""
        raise NotImplementedError

    async def start(self) -> None:
        """Returns when all that the role needs for its first request is there."""

    def end_streams(self) -> None:
        """The engine has stopped: send what streams still hold, then end them."""

    async def close(self) -> None:
        """The server has stopped: close connections."""
