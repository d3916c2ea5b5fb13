"""Starts and stops the gateway process: wires the parts together and makes no decisions."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import structlog
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from gateway.api.adapters import build_adapter_router
from gateway.api.grpc.service import add_inference_services, build_interceptors
from gateway.api.http.connection import ServerConfig
from gateway.api.http.service_routes import build_fleet_router
from gateway.api.openai.batches import build_batch_router
from gateway.app import build_app, build_served_model
from gateway.batches.runner import BatchRunner
from gateway.batches.store import BatchStore
from gateway.request.prepare import ApiOptions
from gateway.router.adapter_loader import AdapterLoader
from gateway.router.autoscaling import Goals
from gateway.router.discovery import Discovery
from gateway.router.fleet import Fleet
from gateway.router.placement import Role
from gateway.router.placer import Placer
from gateway.router.router import Router
from gateway.text.tokenizer import Tokenizer
from gateway.tracing import Tracing, open_traces
from runtime import rpc
from runtime.addresses import DnsName, bracketed, parse_dns_name
from runtime.config import GatewayConfig
from runtime.events import NO_HAND_OFF
from runtime.lifecycle import ReadyReporter, Shutdown, spare_what_is_here, take_open_files
from runtime.logs import setup_logging
from runtime.ops import OpsServer, Probes
from runtime.trust import Trust, load_trust

log = structlog.get_logger()

STOP_S = 2  # for clients to read the rest of their answers
START_PATIENCE_S = 10.0


def run(config: GatewayConfig) -> int:
    """Serves until a signal. Returns the exit code: 1 if the gateway could not start."""
    setup_logging("gateway", config.log_level)
    take_open_files()
    try:
        with OpsServer(config.ops_host, config.ops_port) as ops, open_traces(config.otlp_endpoint) as tracing:
            tokenizer = Tokenizer(Path(config.model), config.max_context_tokens or None)
            uvloop.run(_serve(config, tokenizer, ReadyReporter(config.ready_fd, "gateway"), ops, tracing))
    except (ValueError, OSError) as error:
        log.error("cannot start", reason=str(error))
        return 1
    return 0


async def _serve(
    config: GatewayConfig,
    tokenizer: Tokenizer,
    reporter: ReadyReporter,
    ops: OpsServer,
    tracing: Tracing | None,
) -> None:
    registry = CollectorRegistry()
    trust = load_trust(config)
    trust.watch_handshakes()
    registry.register(trust.refusals.metric)
    fleet, router, discovery = _build_router(config, trust, tokenizer.context_tokens, registry)
    gate = router.gate
    shutdown = Shutdown(config.drain_s, lambda: len(gate))
    gate.is_draining, gate.on_empty = lambda: shutdown.is_draining, shutdown.look_soon
    options = ApiOptions(
        api_keys=config.api_key,
        admin_key=config.admin_key,
        cors_origins=config.cors_origins,
        max_body_bytes=config.body_limit_bytes,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
        keep_billing_header=config.keep_billing_header,
        itl_goal_s=config.itl_goal_ms / 1e3,
        body_timeout_s=config.client_timeout_s,
        stalled_client_s=config.client_timeout_s,
    )
    served = build_served_model(router, tokenizer, config.served_name, options, registry, tracing, fleet.adapters.named)
    app = build_app(served)
    app.include_router(build_fleet_router(fleet, router, served.metrics))
    loader = AdapterLoader(fleet, registry)
    app.include_router(build_adapter_router(served, loader))
    store = BatchStore(Path(config.batch_dir), config.batch_dir_mib << 20) if config.batch_dir else None
    app.include_router(build_batch_router(served, store))
    batches: BatchRunner | None = None
    if store:
        gaps = served.metrics.live_gaps
        batches = BatchRunner(store, app, router, gaps, config.api_key, config.body_limit_bytes)

    grpc_server = rpc.build_server(build_interceptors(served), config.body_limit_bytes)
    grpc_port = rpc.bind(grpc_server, config.host, config.grpc_listen_port)
    add_inference_services(grpc_server, served)
    await discovery.start()
    fleet.start()
    await grpc_server.start()
    rest = _RestServer(ServerConfig(app, config.client_timeout_s, STOP_S))
    listener = rpc.listen_tcp(config.host, config.port)
    serving = asyncio.create_task(rest.serve(sockets=[listener]))
    host = bracketed(config.host)
    address, grpc_address = f"{host}:{listener.getsockname()[1]}", f"{host}:{grpc_port}"
    first_loads = asyncio.create_task(loader.load_first(config.lora_paths))
    ops.follow(Probes(lambda: None, router.check_ready, registry))
    await _wait_until_ready(fleet, router)
    log.info("listening", address=address, grpc=grpc_address, ops=ops.address, model=config.served_name[0])
    if (reason := router.check_ready()) is not None:
        log.warning("not ready yet", reason=reason)
    if batches:
        batches.start()
    shutdown.listen()
    spare_what_is_here()
    reporter.ready(address, ops.address, "", {"grpc": grpc_address, NO_HAND_OFF: router.explain_no_hand_off()})
    await shutdown.wait()
    if batches:
        await batches.close()
    gate.cut_off()
    rest.should_exit = True
    await serving
    await grpc_server.stop(rpc.STOP_GRACE_S)
    first_loads.cancel()
    await discovery.close()
    await fleet.close()
    served.offload.close()


def _build_router(
    config: GatewayConfig, trust: Trust, context_tokens: int, registry: CollectorRegistry
) -> tuple[Fleet, Router, Discovery]:
    """The workers, what sends requests to them, and what finds those that have only a name."""
    names: list[tuple[Role, DnsName]] = []
    fixed: dict[Role, list[str]] = {"prefill": [], "decode": []}
    for role, addresses in fixed.items():
        for text in getattr(config, role):
            if name := parse_dns_name(text):
                names.append((role, name))
            else:
                addresses.append(text)
    open_channel = partial(trust.open_channel, dns_server=config.dns_server)
    fleet = Fleet(fixed["prefill"], fixed["decode"], config.heartbeat_s, config.stall_s, context_tokens, open_channel)
    placer = Placer(config.local_prefill_max_tokens, config.cache_routing, config.no_prefill, bool(config.prefill))
    goals = Goals(config.goal_prefill_wait_s, config.goal_kv_usage, config.itl_goal_ms / 1e3)
    router = Router(fleet, config.max_queue, config.request_timeout_s, config.patience_s, registry, goals, placer)
    return fleet, router, Discovery(fleet, names, config.dns_server, registry)


class _RestServer(uvicorn.Server):
    """Leaves signals to `Shutdown`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _wait_until_ready(fleet: Fleet, router: Router) -> None:
    """Waits until requests can be served and each worker was asked, START_PATIENCE_S at most: some start later."""
    is_ready = asyncio.Event()

    def look() -> None:
        if router.check_ready() is None and all(worker.was_asked for worker in fleet.workers()):
            is_ready.set()

    fleet.subscribe(look)
    with suppress(TimeoutError):
        await asyncio.wait_for(is_ready.wait(), START_PATIENCE_S)
