"""Start and end of a worker process of any role: builds the engine and wires the parts. Decides nothing."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import grpc
import structlog
import torch
import uvloop

from engine.adapters.slots import AdapterLimits
from engine.compose import FullEngine, build_engine, open_device
from engine.engine import Engine, Place, choose_device
from engine.ranks import end_group_member, join_group
from kvtransfer.page_files import host_folder, remove_unowned
from protos import kv_pb2
from runtime import rpc
from runtime.config import DecodeConfig, PrefillConfig
from runtime.config_parts import NO_DRAFT
from runtime.hardware import num_cores, resolve_threads
from runtime.lifecycle import ReadyReporter, Shutdown, spare_what_is_here, take_open_files
from runtime.logs import setup_logging
from runtime.ops import OpsServer, Probes
from runtime.trust import Trust, load_trust
from worker.adapters.slots import AdapterSlots
from worker.kv_cache import KVCacheManager
from worker.loop import WorkerLoop
from worker.metrics import WorkerMetrics
from worker.peers.pools import RankedPool, build_pools
from worker.prefix_cache import PrefixCache
from worker.ranks.children import RANKS_S, RankChildren
from worker.ranks.leader import Leader, LedHeadRunner, LedInputBatch, LedRunner
from worker.scheduler import Scheduler, num_rows_for
from worker.startup.device_limits import complete_here, largest_step_of, size_pool_here
from worker.startup.limits import limits_of, resolve_context
from worker.states.slots import StateSlots, choose_spacing, no_states
from worker.thread import call_in_thread

log = structlog.get_logger()
ConfigT = TypeVar("ConfigT", PrefillConfig, DecodeConfig)


@dataclass(frozen=True, slots=True)
class Built(Generic[ConfigT]):
    """What takes long to build at start."""

    config: ConfigT  # complete: no limit is 0
    engine: FullEngine
    incarnation: str
    children: RankChildren | None  # the other ranks


@dataclass(frozen=True, slots=True)
class Worker:
    """What a role builds on."""

    engine: FullEngine
    me: kv_pb2.Peer
    scheduler: Scheduler
    shutdown: Shutdown
    trust: Trust
    context_tokens: int
    steps_ahead: int  # launched before the last one is collected
    threads: int  # CPU threads that compute steps; 0 on a GPU
    pools: list[RankedPool]  # pages and, of a model with states, slots
    children: RankChildren | None  # the other ranks


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


def run(role: str, config: ConfigT, build_role: Callable[[ConfigT, Worker], Role]) -> int:
    """Build the engine, then serve until a signal. Returns the exit code: 1 if it could not start."""
    setup_logging(role, config.log_level, config.log_format)
    take_open_files()
    reporter, code = ReadyReporter(config.ready_fd, role), 0
    try:
        with OpsServer(config.ops_host, config.ops_port) as ops:
            built = _build(role, config, reporter)
            spare_what_is_here()
            uvloop.run(_serve(role, build_role, built, reporter, ops))
    except (ValueError, OSError) as error:
        log.error("cannot start", reason=str(error))
        code = 1
    if config.tp > 1:
        end_group_member(code)
    return code


def _build(role: str, config: ConfigT, reporter: ReadyReporter) -> Built[ConfigT]:
    load_trust(config)  # reports a bad --tls-dir before loading
    incarnation = rpc.new_incarnation()
    config = complete_here(config, choose_rank_device(config, 0))
    if config.tp == 1:
        place = Place(lends=isinstance(config, PrefillConfig))
        return Built(config, build_rank_engine(config, place, reporter.loading), incarnation, None)
    children = RankChildren(role, config, incarnation)
    leader = Leader(children.ring, lambda: children.is_closing)
    device = choose_rank_device(config, 0)
    ranks = join_group(children.rendezvous, 0, config.tp, device, RANKS_S, open_device(device).open_ranks)
    place = Place(
        ranks, children.pool_fds, partial(LedInputBatch, leader), partial(LedRunner, leader),
        partial(LedHeadRunner, leader, 1),
    )  # fmt: skip
    engine = build_rank_engine(config, place, reporter.loading)
    leader.is_leading = True
    return Built(config, engine, incarnation, children)


def choose_rank_device(config: PrefillConfig | DecodeConfig, rank: int) -> torch.device:
    """Raises ValueError if there is no such device."""
    return choose_device(config.device, rank, config.tp)


def build_rank_engine(
    config: PrefillConfig | DecodeConfig,
    place: Place,
    on_progress: Callable[..., None] = lambda done, total, what="": None,
) -> FullEngine:
    """What each rank of a worker builds, all ranks in parallel."""
    if choose_rank_device(config, place.ranks.rank).type == "cuda":
        return _build_here(config, place, on_progress)
    # OpenMP keeps helper threads per computing thread, and puts them to sleep at once when they outnumber the cores.
    # So only the engine's thread may have helpers while it runs.
    return call_in_thread(partial(_build_here, config, place, on_progress))


def _build_here(config: PrefillConfig | DecodeConfig, place: Place, on_progress: Callable[..., None]) -> FullEngine:
    engine = build_engine(
        config.model,
        "" if config.draft_model == NO_DRAFT else config.draft_model,
        config.dtype,
        config.device,
        max(1, resolve_threads(config.threads, num_cores()) // config.tp),
        config.page_tokens,
        num_rows_for(config.max_running),
        partial(size_pool_here, config),
        on_progress,
        config.max_context_tokens,
        config.quantization,
        config.kv_dtype,
        place,
        largest_step_of(config),
        AdapterLimits(config.max_loras, config.max_lora_rank),
        config.vision,
    )
    limits = limits_of(config, engine.config.vocab_size)
    report = partial(on_progress, what="graphs")
    engine.warm_up(limits.graph_rows, limits.max_drafts, limits.piece_tokens, report)
    return engine


async def _serve(
    role: str,
    build_role: Callable[[ConfigT, Worker], Role],
    built: Built[ConfigT],
    reporter: ReadyReporter,
    ops: OpsServer,
) -> None:
    config, engine, children = built.config, built.engine, built.children
    trust = load_trust(config)
    trust.watch_handshakes()
    server = trust.build_server()
    address = f"{config.reachable_host}:{trust.bind(server, config.host, config.port)}"
    others = await children.connect(config.lease_s) if children else []
    worker = build_worker(role, config, engine, address, trust, built.incarnation, others, children)
    shutdown = worker.shutdown
    parts = build_role(config, worker)
    parts.metrics.registry.register(trust.refusals.metric)
    parts.add_to(server)
    parts.loop.thread.start()
    await parts.start()
    probes = build_probes(parts, shutdown, config.stall_s)
    health = await rpc.start(server, lambda: probes.find_stall() or probes.find_obstacle())
    ops.follow(probes)
    shutdown.listen()
    for weakness, reason in (engine.find_weaknesses() | trust.find_weaknesses()).items():
        log.warning(weakness, reason=reason)
    detail = engine.describe()
    log.info("ready", address=address, ops=ops.address, incarnation=built.incarnation, **detail)
    reporter.ready(address, ops.address, built.incarnation, detail)
    await shutdown.begun.wait()
    not_serving = asyncio.create_task(health.enter_graceful_shutdown())  # a watcher that does not read can block it
    await shutdown.wait()
    await asyncio.to_thread(parts.loop.thread.stop, rpc.STOP_GRACE_S)  # the streams then hold all it has published
    parts.end_streams()
    not_serving.cancel()
    await server.stop(rpc.STOP_GRACE_S)
    await parts.close()
    for pool in worker.pools:
        pool.local.close()
    if config.kv_host_gib and config.ready_fd is None:  # otherwise `baton serve` may start this worker again
        remove_unowned(host_folder())
    if children is not None:
        await children.close()


def build_probes(parts: Role, shutdown: Shutdown, stall_s: float) -> Probes:
    """What a worker says of itself."""
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
    others: Sequence[Sequence[kv_pb2.Rank]] = (),
    children: RankChildren | None = None,
) -> Worker:
    """The engine as a named peer with an empty scheduler over its pages.

    `others`: how peers reach the pages and the slots of ranks 1 and up.
    """
    pools = build_pools(engine, config, incarnation, trust, children)
    peers = [pool.describe(role, address, [other[pool.is_states] for other in others]) for pool in pools]
    me = peers[0]
    me.model = config.model_name
    if len(peers) > 1:
        me.states.CopyFrom(peers[1])
    cache = PrefixCache(engine.num_pages, engine.pool.generations)
    states, num_after = build_states(engine), int(engine.has_head)
    kv = KVCacheManager(cache, config.page_tokens, engine.weights, num_after, states)
    adapters = AdapterSlots(engine.adapters.num_slots if engine.adapters else 0)
    scheduler = Scheduler(kv, config.max_running, config.lease_s, adapters)
    shutdown = Shutdown(config.drain_s, lambda: len(scheduler))
    scheduler.on_empty = shutdown.look_soon
    context_tokens = resolve_context(config.max_context_tokens, engine.config.context_tokens)
    steps_ahead = engine.steps_ahead if config.steps_ahead is None else config.steps_ahead
    threads = resolve_threads(config.threads, num_cores()) if engine.device.type == "cpu" else 0
    return Worker(engine, me, scheduler, shutdown, trust, context_tokens, steps_ahead, threads, pools, children)


def build_states(engine: Engine) -> StateSlots:
    """The owner of the engine's slots, if it has any."""
    pool, states = engine.pool, engine.states
    if states is None:
        return no_states()
    page_tokens = pool.shape.page_tokens
    spacing = choose_spacing(states.all_page_bytes, pool.all_page_bytes, page_tokens)
    return StateSlots(PrefixCache(engine.num_slots, states.generations), page_tokens, spacing)
