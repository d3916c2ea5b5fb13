"""The prefill role: prompts only. Wires its parts and decides nothing."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

import grpc

from engine.batch import ForwardRow
from engine.runner import Begun, Launched, Runner
from engine.steps import Launcher
from prefill_worker.embedded import EmbeddedTexts
from prefill_worker.kv_sender import KVSender
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.service import PrefillService
from protos import prefill_pb2_grpc, worker_pb2_grpc
from runtime.config import PrefillConfig
from runtime.hardware import give_way
from worker import process
from worker.compose import build_features, compose_budget
from worker.loop import StepExtras, WorkerLoop
from worker.peers.kv_peers import KVPeers
from worker.role import Role, Worker
from worker.sequences import ScheduledSequence, Update

NICE = 10  # of a worker whose model only reads: streams on the same cores go first

StartedT = TypeVar("StartedT", Launched, Begun)


def run(config: PrefillConfig) -> int:
    """Serve until a signal. Returns the exit code."""
    return process.run("prefill", config, PrefillRole)


class PrefillRole(Role):
    """The parts of a prefill worker."""

    def __init__(self, config: PrefillConfig, worker: Worker) -> None:
        engine, scheduler = worker.engine, worker.scheduler
        scheduler.kv.needs_draft = engine.has_draft_kv
        self.metrics: PrefillMetrics = PrefillMetrics(scheduler)
        self._sender = KVSender(worker, config.lease_s, self.metrics)
        self._peers = KVPeers(worker.me, worker.pools, config, self.metrics)
        asyncio_loop = asyncio.get_running_loop()

        def publish(step: int, updates: list[Update]) -> None:
            hear = self._service.hand_overs.on_updates if engine.pooled is None else texts.on_updates
            asyncio_loop.call_soon_threadsafe(hear, updates)

        runner: Launcher = engine.runner  # which leads its head, if it has one
        if engine.draft_runner is not None and not engine.has_head:
            runner = BothRunners(engine.runner, engine.draft_runner)
        budget = compose_budget(engine, config.chunk_tokens, "--chunk-tokens")
        texts = EmbeddedTexts(engine.pooled)
        if texts.embeds and engine.rows.device.type == "cpu":
            give_way(NICE)
        extras = DraftKv() if engine.pooled is None else texts
        self.loop = WorkerLoop(
            extras, scheduler, runner, engine.rows, engine.pool, budget, publish, self.metrics, worker.steps_ahead
        )
        thread = self.loop.thread
        features = build_features(worker, config, self._peers, thread, self.metrics)
        self._service = PrefillService(worker, config, thread, features, self._sender, self._peers, self.metrics, texts)

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._service, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, server)

    async def close(self) -> None:
        await self._service.close()
        await self._sender.close()
        await self._peers.close()


class DraftKv(StepExtras):
    """Prompts get both models' KV, which share pages and offers."""

    def draft(self, planned: Seq[ScheduledSequence]) -> None:
        for step in planned:
            step.draft_lead = 0


class BothRunners:
    """Runs the draft model, then the model over the same positions; collecting the second waits for both."""

    def __init__(self, runner: Runner, draft_runner: Runner) -> None:
        self._runner = runner
        self._draft_runner = draft_runner
        self.choose = runner.choose

    def launch(self, requests: Seq[ForwardRow]) -> Launched:
        return self._launch(requests, self._runner.launch)

    def begin(self, requests: Seq[ForwardRow]) -> Begun:
        return self._launch(requests, self._runner.begin)

    def _launch(self, requests: Seq[ForwardRow], launch: Callable[[Seq[ForwardRow]], StartedT]) -> StartedT:
        draft = self._draft_runner.launch([part._replace(num_logits=0, num_given=0) for part in requests])
        try:
            return launch(requests)
        except Exception:
            draft.collect()  # it may still write to pages that are given out when these sequences end
            raise
