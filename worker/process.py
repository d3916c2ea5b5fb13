"""Start and end of a worker process of any role: builds the engine and wires the parts. Decides nothing."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import structlog
import uvloop

from engine.compose import FullEngine
from engine.ranks import end_group_member
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.page_files import host_folder, remove_unowned
from protos import kv_pb2
from runtime import rpc
from runtime.config import DecodeConfig, PrefillConfig, RolesConfig
from runtime.hardware import find_unknown_limits, num_cores, resolve_threads
from runtime.lifecycle import ReadyReporter, Shutdown, spare_what_is_here, take_open_files
from runtime.logs import setup_logging
from runtime.ops import OpsServer, Probes
from runtime.trust import Trust, load_trust
from worker.compose import build_adapters, build_cache, build_states, run_other_host, start_engine
from worker.kv_cache import KVCacheManager
from worker.peers.other_ranks import ALONE, OtherRanks
from worker.peers.pools import MAX_OFFER_BYTES, build_pools
from worker.role import Role, Worker
from worker.scheduler import Scheduler

log = structlog.get_logger()
LEND_ON_S = 2.0  # after a drain that cut requests off: they go on elsewhere, where their KV is read from here
ConfigT = TypeVar("ConfigT", PrefillConfig, RolesConfig, DecodeConfig)


@dataclass(frozen=True, slots=True)
class Built(Generic[ConfigT]):
    """The parts that take long to build at start."""

    config: ConfigT  # complete: no limit is 0
    engine: FullEngine
    others: OtherRanks
    incarnation: str


def run(role: str, config: ConfigT, build_role: Callable[[ConfigT, Worker], Role]) -> int:
    """Build the engine, then serve until a signal. Returns the exit code: 1 if it could not start."""
    setup_logging(role, config.log_level, config.log_format)
    take_open_files()
    reporter, code = ReadyReporter(config.ready_fd, role), 0
    try:
        with OpsServer(config.ops_host, config.ops_port) as ops:
            load_trust(config)  # reports a bad --tls-dir before loading
            if config.advertise_host == rpc.OWN_ADDRESS:
                config = replace(config, advertise_host=rpc.own_address())
            if config.host_rank:
                code = run_other_host(role, config, ops)
            else:
                incarnation = rpc.new_incarnation()
                built = Built(*start_engine(role, config, incarnation, reporter.loading), incarnation)
                spare_what_is_here()
                uvloop.run(_serve(role, build_role, built, reporter, ops))
    except (ValueError, OSError) as error:
        log.error("cannot start", reason=str(error))
        code = 1
    if config.num_ranks > 1:
        end_group_member(code)
    return code


async def _serve(
    role: str,
    build_role: Callable[[ConfigT, Worker], Role],
    built: Built[ConfigT],
    reporter: ReadyReporter,
    ops: OpsServer,
) -> None:
    config, engine, others = built.config, built.engine, built.others
    trust = load_trust(config)
    trust.watch_handshakes()
    server = trust.build_server()
    address = f"{config.reachable_host}:{trust.bind(server, config.host, config.port)}"
    reached = await others.connect(config.lease_s)
    worker = build_worker(role, config, engine, address, trust, built.incarnation, others, reached)
    shutdown = worker.shutdown
    parts = build_role(config, worker)
    parts.metrics.registry.register(trust.refusals.metric)
    parts.add_to(server)
    PageServer({pool.incarnation: pool.own for pool in worker.pools}).add_to(server)
    parts.loop.thread.start()
    if config.exit_when_stuck:
        parts.loop.thread.end_when_stuck(config.stall_s, config.exit_when_stuck)
    await parts.start()
    probes = build_probes(parts, shutdown, config.stall_s)
    health = await rpc.start(server, lambda: probes.find_stall() or probes.find_obstacle())
    ops.follow(probes)
    shutdown.listen()
    weaknesses = engine.find_weaknesses() | trust.find_weaknesses() | find_unknown_limits()
    for weakness, reason in weaknesses.items():
        log.warning(weakness, reason=reason)
    detail = engine.describe()
    log.info("ready", address=address, ops=ops.address, incarnation=built.incarnation, **detail)
    reporter.ready(address, ops.address, built.incarnation, detail)
    await shutdown.begun.wait()
    not_serving = asyncio.create_task(health.enter_graceful_shutdown())  # a watcher that does not read can block it
    await shutdown.wait()
    await asyncio.to_thread(parts.loop.thread.stop, rpc.STOP_GRACE_S)  # the streams then hold all it has published
    is_cut = shutdown.num_left > 0
    parts.end_streams()
    if is_cut:
        await asyncio.sleep(LEND_ON_S)
    not_serving.cancel()
    await server.stop(rpc.STOP_GRACE_S)
    await parts.close()
    for pool in worker.pools:
        pool.local.close()
    if config.kv_host_gib and config.ready_fd is None:  # otherwise `baton serve` may start this worker again
        remove_unowned(host_folder())
    await others.close()


def build_probes(parts: Role, shutdown: Shutdown, stall_s: float) -> Probes:
    """A worker's probes: whether it is stuck or draining, and its metrics."""
    thread, registry = parts.loop.thread, parts.metrics.registry

    def find_stall() -> str | None:
        stuck = thread.progress().find_stuck(stall_s)
        return f"this worker {stuck}" if stuck else None

    return Probes(find_stall, lambda: "this worker is draining" if shutdown.is_draining else None, registry)


def build_worker(
    role: str,
    config: PrefillConfig | DecodeConfig,
    engine: FullEngine,
    address: str,
    trust: Trust,
    incarnation: str,
    others: OtherRanks = ALONE,
    reached: Sequence[Sequence[kv_pb2.Rank]] = (),
) -> Worker:
    """The engine as a named peer with an empty scheduler over its pages.

    `reached`: how peers reach the pages and the slots of the other ranks.
    """
    if role != "prefill" and engine.pooled is not None:
        raise ValueError(f"{engine.folder} makes vectors of texts, and no answers: serve it by `baton prefill` alone")
    pools = build_pools(engine, config, incarnation, trust, others)
    peers = [pool.describe(role, address, [other[pool.is_states] for other in reached]) for pool in pools]
    me = peers[0]
    me.model, me.revision = config.model_name, config.revision or engine.weights[-rpc.REVISION_CHARS :]
    if len(peers) > 1:
        me.states.CopyFrom(peers[1])
    kv = KVCacheManager(
        build_cache(engine), config.page_tokens, engine.weights, engine.num_after, build_states(engine),
        max_offer_pages=max(MAX_OFFER_BYTES // engine.pool.all_page_bytes, 1),
    )  # fmt: skip
    scheduler = Scheduler(kv, config.max_running, config.lease_s, build_adapters(engine))
    shutdown = Shutdown(config.drain_s, lambda: len(scheduler))
    scheduler.on_empty = shutdown.look_soon
    context_tokens = min(config.max_context_tokens or engine.config.context_tokens, engine.config.context_tokens)
    steps_ahead = engine.steps_ahead if config.steps_ahead is None else config.steps_ahead
    threads = resolve_threads(config.threads, num_cores()) if engine.device.type == "cpu" else 0
    return Worker(engine, me, scheduler, shutdown, trust, context_tokens, steps_ahead, threads, pools, others)
