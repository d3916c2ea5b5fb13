"""The decode role: answers first, with a small budget for prompts. Wires its parts and decides nothing."""

import asyncio
from collections.abc import Callable

import grpc

from decode_worker.compose import build_drafts, build_grammars, build_masks
from decode_worker.interfaces import Drafts, Masks
from decode_worker.kv_receiver import KVReceiver
from decode_worker.metrics import DecodeMetrics
from decode_worker.service import DecodeService
from decode_worker.step_extras import DraftsAndMasks
from decode_worker.streams import GatewayStreams
from protos import decode_pb2_grpc, worker_pb2_grpc
from runtime.config import DecodeConfig
from worker import process
from worker.compose import build_features, compose_budget
from worker.loop import StepExtras, WorkerLoop
from worker.peers.kv_peers import KVPeers
from worker.role import Role, Worker
from worker.scheduler import Scheduler
from worker.sequences import Update


def run(config: DecodeConfig) -> int:
    """Serve until a signal. Returns the exit code."""
    return process.run("decode", config, DecodeRole)


class DecodeRole(Role):
    """The parts of a decode worker."""

    def __init__(
        self, config: DecodeConfig, worker: Worker, build_metrics: Callable[[Scheduler], DecodeMetrics] = DecodeMetrics,
        build_extras: Callable[[Drafts, Masks, Scheduler], StepExtras] = DraftsAndMasks,
        build_service: Callable[..., DecodeService] = DecodeService,
    ) -> None:  # fmt: skip
        """A worker with more than this role builds some parts by itself."""
        engine, scheduler = worker.engine, worker.scheduler
        self.metrics: DecodeMetrics = build_metrics(scheduler)
        self._streams = GatewayStreams(worker.me.incarnation)
        asyncio_loop = asyncio.get_running_loop()

        def publish(step: int, updates: list[Update]) -> None:
            asyncio_loop.call_soon_threadsafe(self._hear, step, updates)

        drafts = build_drafts(engine, config)
        budget = compose_budget(
            engine, config.local_prefill_chunk_tokens, "--local-prefill-chunk-tokens", config.itl_goal_ms / 1e3
        )
        extras = build_extras(drafts, build_masks(), scheduler)
        self.loop = WorkerLoop(
            extras, scheduler, engine.runner, engine.rows, engine.pool, budget, publish, self.metrics,
            worker.steps_ahead,
        )  # fmt: skip
        scheduler.most_answers = self.loop.chunks.most_answers
        if (seconds := drafts.measured_s()) is not None:
            self.loop.chunks.note_step(1, 0, seconds)
        self._peers = KVPeers(worker.me, worker.pools, config, self.metrics)
        self._receiver = KVReceiver(worker, self._peers, self.loop.thread, self.metrics)
        self._grammars = build_grammars(engine, config, self.metrics)
        self._features = build_features(worker, config, self._peers, self.loop.thread, self.metrics)
        self._features.weights.leave = self._streams.restart
        self._service = build_service(
            worker, self.loop.thread, self._features, self._receiver, self._streams, self.metrics, drafts,
            self._grammars, self.loop.chunks,
        )  # fmt: skip

    def _hear(self, step: int, updates: list[Update]) -> None:
        """Pass a step's updates on. On the asyncio thread."""
        self._streams.publish(step, updates)

    async def start(self) -> None:
        await self._grammars.start()

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self._service, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, server)

    def end_streams(self) -> None:
        self._streams.close()

    async def close(self) -> None:
        await self._service.close()
        await self._peers.close()
        await self._grammars.close()
