"""Starts and stops the gateway process: wires the parts together and makes no decisions."""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import structlog
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from gateway.access.key_file import KeyFile
from gateway.access.keys import Keys
from gateway.adapters.link import LinkedAdapters
from gateway.adapters.loader import AdapterLoader
from gateway.api.adapters import build_adapter_router
from gateway.api.grpc.service import add_inference_services, bound_connections, build_interceptors
from gateway.api.http.connection import ServerConfig
from gateway.api.http.service_routes import build_fleet_router
from gateway.api.revisions import build_revisions_router
from gateway.api.tls import ServerTls
from gateway.api.weights import build_weights_router
from gateway.app import add_model, build_app
from gateway.batches.routes import add_batches
from gateway.batches.runner import BatchRunner
from gateway.batches.store import BatchStore
from gateway.embeddings.attempt import EmbeddingAttempt
from gateway.loop_watch import LoopWatch
from gateway.metrics import ModelMetrics
from gateway.policies.forecast import Forecast
from gateway.policies.homes import Homes
from gateway.policies.local_prefill import choose_local_prefill
from gateway.policies.rollout import Rollout
from gateway.policies.session_gaps import SessionGaps
from gateway.request.prepare import ApiOptions, ServedModel, ServedModels
from gateway.router.admission import Admission
from gateway.router.attempt import Attempt
from gateway.router.fleet import Fleet
from gateway.router.placer import Placer
from gateway.router.router import Router
from gateway.router.worker_view import Role
from gateway.scaling.autoscaling import FleetMetrics, Goals
from gateway.scaling.discovery import Discovery
from gateway.scaling.model_gate import ModelGate
from gateway.scaling.role_keeper import RoleKeeper
from gateway.scaling.sleepers import Sleepers
from gateway.scaling.weights import WeightKeeper
from gateway.store.adapters import SharedAdapters
from gateway.store.database import StoreError
from gateway.store.follower import Follower
from gateway.store.keeper import AnswerKeeper
from gateway.store.rollout import SharedRollout
from gateway.store.routes import add_answers
from gateway.store.runs import Runs
from gateway.text.tokenizer import Tokenizer
from gateway.text.trial import load_tokenizer
from gateway.tracing import Tracing, open_traces
from runtime import rpc
from runtime.addresses import Named, bracketed, is_loopback, parse_named
from runtime.config import GatewayConfig
from runtime.events import NO_HAND_OFF, ModelState
from runtime.lifecycle import (
    ReadyReporter,
    Shutdown,
    open_link,
    return_freed_memory,
    spare_what_is_here,
    take_open_files,
)
from runtime.logs import setup_logging
from runtime.ops import OpsServer, Probes
from runtime.tasks import keep_running
from runtime.trust import Trust, load_trust

log = structlog.get_logger()

STOP_S = 2  # for clients to read the rest of their answers
START_PATIENCE_S = 10.0
SWITCH_S = 0.001  # Python's is 5 ms: the event loop waits so long, again and again, while a thread tokenises


def run(config: GatewayConfig, folders: Mapping[str, str]) -> int:
    """Serves until a signal. Returns the exit code: 1 if the gateway could not start.

    `folders`: a name of each model in requests |-> its tokenizer and configuration.
    """
    setup_logging("gateway", config.log_level, config.log_format)
    sys.setswitchinterval(SWITCH_S)
    take_open_files()
    try:
        with OpsServer(config.ops_host, config.ops_port) as ops, open_traces(config.otlp_endpoint) as tracing:
            most = config.max_context_tokens or None
            tokenizers = {name: load_tokenizer(Path(folder), most) for name, folder in folders.items()}
            if not config.decode and (lacking := [name for name, one in tokenizers.items() if one.pooling is None]):
                raise ValueError(f"--decode needs a worker's host:port: {', '.join(lacking)} answers prompts")
            uvloop.run(_serve(config, tokenizers, ReadyReporter(config.ready_fd, "gateway"), ops, tracing))
    except (ValueError, OSError, StoreError) as error:
        log.error("cannot start", reason=str(error))
        return 1
    return 0


async def _serve(
    config: GatewayConfig,
    tokenizers: Mapping[str, Tokenizer],
    reporter: ReadyReporter,
    ops: OpsServer,
    tracing: Tracing | None,
) -> None:
    registry = CollectorRegistry()
    trust = load_trust(config)
    trust.watch_handshakes()
    registry.register(trust.refusals.metric)
    fleet, discovery = _build_fleet(config, trust, tokenizers, registry)
    shutdown = Shutdown(config.drain_s, lambda: sum(router.admission.num_inside for router in routers.values()))
    rollout = Rollout(config.revision_shares(), is_for_several=len(tokenizers) > 1)
    served, routers, loaders = _build_models(config, fleet, tokenizers, registry, shutdown, tracing, rollout)
    keepers = {name: WeightKeeper(fleet.parts.get(name, fleet)) for name in routers}
    key_file = KeyFile(Path(config.api_keys_file), served.keys) if config.api_keys_file else None
    place = config.state_url or (Path(config.state_dir) if config.state_dir else None)  # of the store
    runs = _build_runs(config, served, place)
    keeper = AnswerKeeper(served, runs) if runs else None
    followers: list[Follower] = [SharedRollout(runs, rollout)] if runs else []
    app = build_app(served, keeper)
    add_answers(app, served, keeper)
    app.include_router(build_fleet_router(fleet, routers, served))
    app.include_router(build_adapter_router(served, loaders))
    app.include_router(build_revisions_router(served, rollout, lambda: [worker.view() for worker in fleet.workers()]))
    app.include_router(build_weights_router(served, keepers))
    store: BatchStore | None = None
    if config.batch_dir:
        store = BatchStore(Path(config.batch_dir), config.batch_dir_mib << 20, place, config.state_lease_s)
    add_batches(app, served, store)
    batches = BatchRunner(store, app, served, served.keys, config.body_limit_bytes) if store else None

    tls = ServerTls(Path(config.tls_cert), Path(config.tls_key)) if config.tls_cert else None
    connections = bound_connections(config.client_timeout_s)
    grpc_server = rpc.build_server(build_interceptors(served), config.body_limit_bytes, connections)
    grpc_port = rpc.bind(grpc_server, config.host, config.grpc_listen_port, tls.credentials if tls else None)
    add_inference_services(grpc_server, served)
    if runs:
        await runs.start()
    await discovery.start()
    following = [asyncio.create_task(return_freed_memory())]
    following += _follow_roles(config, fleet, routers, runs)
    gates = [router.model for router in routers.values() if isinstance(router.model, ModelGate)]
    following += await _follow_sleep(config, fleet, gates)
    if tls:
        following.append(asyncio.create_task(tls.follow()))
    if key_file:
        following.append(asyncio.create_task(key_file.follow()))
    fleet.start()
    await grpc_server.start()
    tls_context = tls.context if tls else None
    rest = RestServer(ServerConfig(app, config.client_timeout_s, STOP_S, tls_context, served.held))
    listener = rpc.listen_tcp(config.host, config.port)
    serving = asyncio.create_task(rest.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: shutdown.begin("the REST server ended"))
    host = bracketed(config.host)
    address, grpc_address = f"{host}:{listener.getsockname()[1]}", f"{host}:{grpc_port}"
    paths = config.lora_paths(tuple(loaders))
    reading = [*served.start_images(), asyncio.create_task(served.templates.start())]
    for name, loader in loaders.items():
        loader.expect(paths[name])
    if runs:
        followers.append(SharedAdapters(runs, loaders))
    for follower in followers:
        await follower.start()
    ops.follow(Probes(lambda: None, served.readiness, registry))
    await _wait_until_ready(fleet, served.models)
    if (openness := find_openness(config)) is not None:
        log.warning("no key is asked for", address=address, reason=openness)
    log.info("listening", address=address, grpc=grpc_address, ops=ops.address, model=", ".join(loaders))
    if (reason := served.readiness()) is not None:
        log.warning("not ready yet", reason=reason)
    if batches:
        batches.start()
    if runs:
        runs.serve()
    shutdown.listen()
    spare_what_is_here()
    watch = LoopWatch(registry)
    watch.start()
    note = next(filter(None, (router.explain_no_hand_off() for router in routers.values())), "")
    reporter.ready(address, ops.address, "", {"grpc": grpc_address, NO_HAND_OFF: note})
    await shutdown.begun.wait()
    if batches:
        await batches.close()  # its lines are for the next gateway: the drain does not wait for them
    if runs:
        await runs.drain()
    await shutdown.wait()
    if runs:
        await runs.let_go()
    watch.close()
    for router in routers.values():
        router.admission.cut_off()
    rest.should_exit = True
    await serving
    await grpc_server.stop(rpc.STOP_GRACE_S)
    for task in (*following, *reading):
        task.cancel()
    for follower in followers:
        await follower.close()
    await discovery.close()
    await fleet.close()
    await served.close()
    if runs:
        await runs.close()
    if store:
        store.close()


def find_openness(config: GatewayConfig) -> str | None:
    """Says what anyone on the network can do without a key, and what to set; None where keys are not needed."""
    if config.api_key or config.api_keys_file or is_loopback(config.host):
        return None
    has_store = config.state_dir or config.state_url
    kept = [name for name, where in (("files and batches", config.batch_dir), ("stored answers", has_store)) if where]
    read = f", and read all {' and '.join(kept)}" if kept else ""
    return f"every client that reaches this port can use all models{read}: set BATON_API_KEY or --api-keys-file"


def _build_runs(config: GatewayConfig, served: ServedModels, place: str | Path | None) -> Runs | None:
    """Builds the owner of the answers that are kept; None: none are."""
    if place is None:
        return None
    lease_s, max_bytes = config.state_lease_s, config.state_max_mib << 20
    return Runs(served, place, ttl_s=config.state_ttl, max_bytes=max_bytes, lease_s=lease_s)


def _build_models(
    config: GatewayConfig,
    fleet: Fleet,
    tokenizers: Mapping[str, Tokenizer],
    registry: CollectorRegistry,
    shutdown: Shutdown,
    tracing: Tracing | None,
    rollout: Rollout,
) -> tuple[ServedModels, dict[str, Router], dict[str, AdapterLoader]]:
    """Builds the models that the APIs serve, and for each its router and the loader of its adapters."""
    keys = Keys(config.api_key, config.admin_key, has_file=bool(config.api_keys_file))
    salts_by_key = keys.are_several if config.cache_salt_by_key is None else config.cache_salt_by_key
    options = ApiOptions(
        api_keys=config.api_key,
        admin_key=config.admin_key,
        hosts=config.allowed_host,
        salts_by_key=salts_by_key,
        restarts=config.on_revision_gone == "restart",
        max_queue=config.max_queue,
        cors_origins=config.cors_origins,
        max_body_bytes=config.body_limit_bytes,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
        max_image_pixels=config.image_limit_pixels,
        image_hosts=config.allow_image_url,
        itl_goal_s=config.itl_goal_ms / 1e3,
        body_timeout_s=config.client_timeout_s,
        stalled_client_s=config.client_timeout_s,
    )
    served = ServedModels(options, registry, keys)
    routers: dict[str, Router] = {}
    loaders: dict[str, AdapterLoader] = {}
    labelled = ModelMetrics() if len(tokenizers) > 1 else None
    for name, tokenizer in tokenizers.items():
        own_fleet, own_registry, names = fleet, registry, config.served_name
        if labelled is not None:
            own_fleet, own_registry = fleet.parts[name], labelled.add(name)
            names = (name, *(() if served.models else config.served_name))  # "*" is the first's
        can_sleep = bool(config.max_awake or config.sleep_after_s)
        model = ModelGate(fleet.changes, name if can_sleep or labelled else "")
        embeds = tokenizer.pooling is not None
        router = routers[name] = _build_router(config, own_fleet, own_registry, shutdown, model, rollout, embeds)
        loader = loaders[name] = AdapterLoader(own_fleet, own_registry)
        add_model(served, router, tokenizer, names, own_registry, tracing, loader.adapters.named)
    if labelled is not None:
        registry.register(labelled)
    return served, routers, loaders


def _build_fleet(
    config: GatewayConfig, trust: Trust, tokenizers: Mapping[str, Tokenizer], registry: CollectorRegistry
) -> tuple[Fleet, Discovery]:
    """The workers, with a part for each of several models, and what finds those that have only a name."""
    names: list[tuple[Role, Named]] = []
    fixed: dict[Role, list[str]] = {"prefill": [], "decode": []}
    for role, addresses in fixed.items():
        for text in getattr(config, role):
            if name := parse_named(text):
                names.append((role, name))
            else:
                addresses.append(text)
    open_channel = partial(trust.open_channel, dns_server=config.dns_server)
    longest = max(tokenizer.context_tokens for tokenizer in tokenizers.values())
    limits = config.heartbeat_s, config.stall_s, longest
    fleet = Fleet(fixed["prefill"], fixed["decode"], *limits, open_channel, adapters=LinkedAdapters())
    for model, tokenizer in tokenizers.items() if len(tokenizers) > 1 else ():
        fleet.add_part(model, tokenizer.context_tokens)
    return fleet, Discovery(fleet, names, config.dns_server, registry)


def _follow_roles(
    config: GatewayConfig, fleet: Fleet, routers: Mapping[str, Router], runs: Runs | None
) -> list[asyncio.Task[None]]:
    """Have workers of both roles follow the load. With a store one gateway at a time decides."""
    name = runs.id if runs else rpc.new_incarnation()
    keepers = [
        RoleKeeper(fleet.parts.get(model, fleet), router.queue, name, lambda: runs is None or runs.is_first)
        for model, router in (routers.items() if config.roles == "auto" else ())
    ]
    return [asyncio.create_task(keep_running(keeper.run, "keeping roles")) for keeper in keepers]


async def _follow_sleep(config: GatewayConfig, fleet: Fleet, gates: Sequence[ModelGate]) -> list[asyncio.Task[None]]:
    """Have `baton serve` put models to sleep and wake them, if it is to. The task ends when that does."""
    if not (config.max_awake or config.sleep_after_s) or config.ready_fd is None:
        return []
    link = await open_link(config.ready_fd)
    sleepers = Sleepers(fleet, gates, config.max_awake, config.sleep_after_s, config.patience_s, link.send)

    async def follow() -> None:
        async for event in link.read():
            if isinstance(event, ModelState):
                sleepers.learn(event)

    sleepers.look()
    return [asyncio.create_task(keep_running(follow, "following models that sleep"))]


def _build_router(
    config: GatewayConfig, fleet: Fleet, registry: CollectorRegistry, shutdown: Shutdown, model: ModelGate,
    rollout: Rollout, embeds: bool,
) -> Router:  # fmt: skip
    """Builds the router of one model. embeds: it sends texts to prefill workers, which wait for no others' KV."""
    expects_prefill = bool(config.prefill) and not embeds
    uses_cache, no_prefill = config.cache_routing and not embeds, "fallback" if embeds else config.no_prefill
    local_prefill = choose_local_prefill(config.local_prefill_max_tokens)
    placer = Placer(local_prefill, uses_cache, no_prefill, expects_prefill, rollout, Homes())
    goals = Goals(config.goal_prefill_wait_s, config.goal_kv_usage, config.itl_goal_ms / 1e3)
    router = Router(
        fleet,
        Admission(config.max_queue, lambda: shutdown.is_draining, shutdown.look_soon),
        config.request_timeout_s,
        config.patience_s,
        registry,
        bool(config.itl_goal_ms),
        placer,
        model=model,
        keep_times=SessionGaps(),
        expectations=Forecast(),
        begin=EmbeddingAttempt if embeds else Attempt,
    )
    registry.register(FleetMetrics(router.queue, lambda: router.admission.num_waiting, goals))
    return router


class RestServer(uvicorn.Server):
    """Leaves signals to `Shutdown`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _wait_until_ready(fleet: Fleet, models: Sequence[ServedModel]) -> None:
    """Waits until all models can be served and each worker was asked, START_PATIENCE_S at most: some start later."""

    def is_ready() -> bool:
        is_served = all(model.ring.readiness() is None for model in models)
        return is_served and all(worker.was_asked for worker in fleet.workers())

    await fleet.changes.until(is_ready, START_PATIENCE_S)
