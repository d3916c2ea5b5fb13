"""Start and end of a prefill worker process: wires the parts together and decides nothing."""

import asyncio
import os
from functools import partial

from engine.engine import Engine, build_engine
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.identity import PoolFacts, build_peer
from prefill_worker.batching import Planned
from prefill_worker.loop import PrefillLoop
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.offers import MAX_OFFER_BYTES, Offers
from prefill_worker.run_table import RunTable
from prefill_worker.service import PrefillService
from protos import prefill_pb2_grpc
from runtime import rpc
from runtime.config import PrefillConfig
from runtime.config_parts import NO_DRAFT
from runtime.hardware import num_cores, resolve_context, resolve_threads, size_pool
from runtime.lifecycle import ReadyReporter, Shutdown, announce, run_worker
from runtime.trust import load_trust


def run(config: PrefillConfig) -> int:
    """Serve until a signal. Returns the exit code."""
    return run_worker("prefill", config, _build, _serve)


def _build(config: PrefillConfig, reporter: ReadyReporter) -> Engine:
    load_trust(config)  # a bad --tls-dir is told now rather than after loading
    return build_engine(
        config.model,
        "" if config.draft_model == NO_DRAFT else config.draft_model,
        config.dtype,
        config.device,
        resolve_threads(config.threads, num_cores()),
        config.page_tokens,
        partial(size_pool, config),
        reporter.loading,
        config.max_context_tokens,
    )


async def _serve(config: PrefillConfig, engine: Engine, reporter: ReadyReporter) -> None:
    trust = load_trust(config)
    trust.watch_handshakes()
    server = trust.build_server()
    address = f"{config.reachable_host}:{trust.bind(server, config.host, config.port)}"
    incarnation = rpc.new_incarnation()
    facts = PoolFacts(
        engine.weights, engine.dtype, engine.config.num_layers, engine.config.num_kv_heads, config.page_tokens,
        engine.config.head_dim, engine.pool.num_pages, engine.pool.fd, engine.pool.pages_offset, engine.draft_weights,
    )  # fmt: skip
    me = build_peer("prefill", address, incarnation, os.getpid(), rpc.host_identity(), facts)
    max_offer_pages = max(MAX_OFFER_BYTES // engine.pool.page_bytes, 1)
    table = RunTable(engine.allocator, config.page_tokens, config.max_running, max_offer_pages)
    shutdown = Shutdown(config.drain_s, lambda: len(table))
    table.on_empty = shutdown.look_soon
    metrics = PrefillMetrics(table)
    metrics.registry.register(trust.refusals.metric)
    offers = Offers(me, engine.pool, metrics, config.lease_s, trust.open_channel)
    asyncio_loop = asyncio.get_running_loop()

    def publish(planned: list[Planned], started: float, error: Exception | None) -> None:
        asyncio_loop.call_soon_threadsafe(service.on_step, planned, started, error)

    loop = PrefillLoop(
        table, engine.runner, config.chunk_tokens, publish, metrics, engine.pool.size_mib, engine.draft_runner
    )  # fmt: skip
    context_tokens = resolve_context(config.max_context_tokens, engine.config.context_tokens)
    service = PrefillService(
        me, table, loop.thread, offers, metrics, context_tokens, engine.config.vocab_size, config.heartbeat_s,
        config.stall_s, shutdown,
    )  # fmt: skip
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
    PageServer(engine.pool, incarnation).add_to(server)
    metrics_port = metrics.serve(config.host, config.metrics_port)
    loop.thread.start()
    await rpc.start(server)
    metrics_address = f"{config.reachable_host}:{metrics_port}"
    shutdown.listen()
    announce(reporter, address, metrics_address, incarnation, engine.describe(), engine.find_weaknesses())
    await shutdown.wait()
    await server.stop(rpc.STOP_GRACE_S)
    await offers.close()
    loop.thread.stop(rpc.STOP_GRACE_S)
