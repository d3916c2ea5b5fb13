"""`baton serve`: a whole service on this machine, one process per part. `baton gateway`, `prefill`, `decode`: one part.

The heavy imports of a part stand in its function, so that other commands and --help need not wait for torch or the web
server.
"""

import asyncio
import os
import secrets
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cli.plan import PROGRAM, ProcessSpec, choose_prefill_workers, find_addresses, plan_gateway, plan_workers
from cli.screen import Screen
from cli.supervisor import STOP_MARGIN_S, Supervisor
from kvtransfer.page_files import host_folder, needing_files
from runtime import rpc
from runtime.child import follow_parent
from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig, RolesConfig, ServeConfig
from runtime.config_parts import find_hosts
from runtime.events import Ready
from runtime.gpus import visible_gpus
from runtime.hardware import wait_without_spinning
from runtime.logs import setup_logging
from runtime.settings import ConfigError, flag
from runtime.trust import load_trust
from wire.pooling import read_pooling
from worker.startup.models import check_model, check_models, choose_served_names, fetch_tokenizer, locate, name_models


def serve(config: Annotated[ServeConfig, Parameter(name="*")] = ServeConfig()) -> int:  # noqa: B008  frozen
    """Start a gateway and its workers on this machine, and stop them together."""
    if config.ray:
        from cli.ray_fleet import serve_on_ray

        return serve_on_ray(*begin(resolve_models(config)))
    if find_spec("torch") is None:
        raise ModuleNotFoundError("workers compute with torch", name="torch")
    check_ports(config)  # these fail now rather than after minutes of loading
    config = resolve_models(config)
    load_trust(config)
    return asyncio.run(supervise(config))


def resolve_models(config: ServeConfig) -> ServeConfig:
    """The settings with names for all models. ConfigError if a model cannot be used, or an adapter has its name."""
    models = name_models(config.model, config.served_name)
    for model in models.values():
        check_models(model, config.draft_model)
    config.lora_paths(tuple(models))
    if len(models) == 1:
        return replace(config, served_name=choose_served_names(config.served_name, config.model[0]))
    return replace(config, model=tuple(f"{name}={model}" for name, model in models.items()))


def check_ports(config: ServeConfig) -> None:
    """Raise ConfigError when the gateway cannot listen on its ports."""
    ports = (("port", config.port), ("grpc_port", config.grpc_listen_port), ("ops_port", config.ops_port))
    with ExitStack() as held:  # all at once: they must differ
        for name, port in ports:
            host = config.ops_host if name == "ops_port" else config.host
            try:
                held.enter_context(rpc.open_listener(host, port))
            except OSError as error:
                number = error.errno or 0
                reason = os.strerror(number) if number > 0 else error.strerror  # negative: a name unknown
                advice = f"set {flag(name)} to another, or 0 for any"
                raise ConfigError(f"{name}={port} on host {host} cannot be used ({reason}): {advice}") from error


def begin(config: ServeConfig) -> tuple[ServeConfig, Screen]:
    """The settings with a secret for the processes, if they have no certificates, and where the service reports."""
    setup_logging("serve", config.log_level, config.log_format)
    needs_key = bool(config.api_key or config.api_keys_file)
    model = next(iter(name_models(config.model, config.served_name)))
    screen = Screen(model, needs_key, has_tls=bool(config.tls_cert), log_format=config.log_format)
    if not config.tls_dir and not config.fleet_secret:
        config = replace(config, fleet_secret=secrets.token_hex(32))
    return config, screen


async def supervise(config: ServeConfig, program: tuple[str, ...] = PROGRAM, stop_s: float | None = None) -> int:
    """Run the service of `config` until it is stopped; returns the exit code.

    `program` is what runs a role, `stop_s` the time that processes have to end by themselves: the drain and a margin.
    """
    config, screen = begin(config)
    if stop_s is None:
        stop_s = config.drain_s + STOP_MARGIN_S
    gpus = visible_gpus()
    num_prefill, why = choose_prefill_workers(config, len(gpus))
    embedding = find_embedding(config)
    num_decode = 0 if len(embedding) == len(config.model) else config.decode_workers
    if embedding:
        why = "models that make vectors of texts have prefill workers alone"
        num_prefill = max(num_prefill, 1)
    counts = f"{num_prefill} prefill, {num_decode} decode"
    screen.say(f"workers: {counts}: {why}", "workers", prefill=num_prefill, decode=num_decode, reason=why)
    workers = plan_workers(config, gpus, program, embedding)

    def plan(ready: list[Ready]) -> ProcessSpec:
        return plan_gateway(config, *find_addresses(ready), program)

    names = name_models(config.model, config.served_name)
    by_model = {name: [one for one in workers if one.settings.model_name in ("", name)] for name in names}
    with needing_files(host_folder()) if config.kv_host_gib else nullcontext():
        return await Supervisor(screen, config.start_timeout_s, stop_s).run(by_model, plan, config.max_awake)


def find_embedding(config: ServeConfig) -> list[str]:
    """Names of the models that make vectors of texts; "" of one model alone."""
    folders = {name: Path(fetch_tokenizer(model)) for name, model in name_models(config.model, ()).items()}
    found = [name for name, folder in folders.items() if read_pooling(folder) is not None]
    return [""] * len(found) if len(folders) == 1 else found


def prefill(config: Annotated[PrefillConfig, Parameter(name="*")] = PrefillConfig()) -> int:  # noqa: B008  frozen
    """Start one prefill worker: it computes the KV of prompts and offers it to decode workers."""
    follow_parent(config.ready_fd)
    wait_without_spinning()
    from prefill_worker.main import run

    return run(locate(find_hosts(config, os.environ)))


def decode(config: Annotated[DecodeConfig, Parameter(name="*")] = DecodeConfig()) -> int:  # noqa: B008  frozen
    """Start one decode worker: it reads the KV of prompts and generates all tokens."""
    follow_parent(config.ready_fd)
    wait_without_spinning()
    from decode_worker.main import run

    return run(locate(find_hosts(config, os.environ)))


def worker(config: Annotated[RolesConfig, Parameter(name="*")] = RolesConfig()) -> int:  # noqa: B008  frozen
    """Start one worker of both roles, each of which can be opened and closed while it serves."""
    follow_parent(config.ready_fd)
    wait_without_spinning()
    from cli.both_roles import run

    return run(locate(find_hosts(config, os.environ)))


def gateway(config: Annotated[GatewayConfig | None, Parameter(name="*")] = None) -> int:
    """Start the gateway: it answers REST and gRPC and sends prompts to workers."""
    config = config or GatewayConfig()  # which says that it needs a worker
    follow_parent(config.ready_fd)
    for name in ("sleep_after_s", "max_awake"):
        can_sleep = not getattr(config, name) or config.ready_fd is not None
        config.require(name, can_sleep, "baton serve, which starts and stops workers")
    # Transformers takes torch for not installed: the gateway uses no tensors, and importing torch would double the time
    # that it takes to start, and take 190 MB. The variable keeps transformers from warning of that.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    models = name_models(config.model, config.served_name)
    folders = {name: fetch_tokenizer(model) for name, model in models.items()}
    for folder in folders.values():
        check_model(folder, ("configuration", "tokenizer"))
    if len(models) == 1:
        config = replace(config, served_name=choose_served_names(config.served_name, config.model[0]))
    from gateway.main import run

    return run(config, folders)
