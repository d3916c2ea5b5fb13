"""Start and end of a decode worker process: wires the parts together and decides nothing."""

import asyncio
import os
from functools import partial

from decode_worker.grammar.compiler import GrammarCompiler
from decode_worker.grammar.grammars import Grammars
from decode_worker.intake import Intake
from decode_worker.loop import DecodeLoop
from decode_worker.metrics import DecodeMetrics, GrammarMetrics
from decode_worker.service import DecodeService
from decode_worker.session import Delta
from decode_worker.session_table import SessionTable
from decode_worker.speculation.start import build_speculator
from decode_worker.streams import GatewayStreams
from engine.engine import Engine, build_engine
from kvtransfer.identity import PoolFacts, build_peer
from protos import decode_pb2_grpc
from runtime import rpc
from runtime.config import DecodeConfig
from runtime.config_parts import NO_DRAFT
from runtime.hardware import num_cores, resolve_context, resolve_threads, size_pool
from runtime.lifecycle import ReadyReporter, Shutdown, announce, run_worker
from runtime.trust import load_trust


def run(config: DecodeConfig) -> int:
    """Serve until a signal. Returns the exit code."""
    return run_worker("decode", config, _build, _serve)


def _build(config: DecodeConfig, reporter: ReadyReporter) -> Engine:
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


async def _serve(config: DecodeConfig, engine: Engine, reporter: ReadyReporter) -> None:
    trust = load_trust(config)
    trust.watch_handshakes()
    server = trust.build_server()
    address = f"{config.reachable_host}:{trust.bind(server, config.host, config.port)}"
    incarnation = rpc.new_incarnation()
    facts = PoolFacts(
        engine.weights, engine.dtype, engine.config.num_layers, engine.config.num_kv_heads, config.page_tokens,
        engine.config.head_dim, engine.pool.num_pages, engine.pool.fd, engine.pool.pages_offset, engine.draft_weights,
    )  # fmt: skip
    me = build_peer("decode", address, incarnation, os.getpid(), rpc.host_identity(), facts)
    table = SessionTable(engine.allocator, config.page_tokens, config.max_running, config.lease_s)
    shutdown = Shutdown(config.drain_s, lambda: len(table))
    table.on_empty = shutdown.look_soon
    metrics = DecodeMetrics(table)
    metrics.registry.register(trust.refusals.metric)
    streams = GatewayStreams(incarnation)
    asyncio_loop = asyncio.get_running_loop()

    def publish(step: int, deltas: list[Delta]) -> None:
        asyncio_loop.call_soon_threadsafe(streams.publish, step, deltas)

    speculator = build_speculator(engine, config)
    loop = DecodeLoop(
        table, engine.runner, engine.pool, speculator, config.local_prefill_chunk_tokens, publish, metrics
    )  # fmt: skip
    intake = Intake(
        me, engine.pool, table, loop.thread, metrics, config.transport, config.require_transport, config.lease_s,
        trust.open_channel,
    )  # fmt: skip
    context_tokens = resolve_context(config.max_context_tokens, engine.config.context_tokens)
    compiler = GrammarCompiler(engine.folder, engine.config.vocab_size, config.grammar_cpu_s)
    grammars = Grammars(compiler, config.grammar_cache_mib << 20, GrammarMetrics(metrics))
    service = DecodeService(
        me, table, loop.thread, intake, streams, metrics, context_tokens, engine.config.vocab_size, shutdown,
        speculator, grammars,
    )  # fmt: skip
    decode_pb2_grpc.add_DecodeServicer_to_server(service, server)
    metrics_port = metrics.serve(config.host, config.metrics_port)
    loop.thread.start()
    await rpc.start(server)
    metrics_address = f"{config.reachable_host}:{metrics_port}"
    shutdown.listen()
    announce(reporter, address, metrics_address, incarnation, engine.describe(), engine.find_weaknesses())
    await shutdown.wait()
    await asyncio.to_thread(loop.thread.stop, rpc.STOP_GRACE_S)  # what it has published is in the streams then
    streams.close()
    await server.stop(rpc.STOP_GRACE_S)
    await intake.close()
    await grammars.close()
