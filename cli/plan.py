"""Which processes make up a service on one machine, and the command line of each. Pure: values in, values out."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig, ServeConfig
from runtime.events import Ready
from runtime.settings import Settings, field_names, flag

LOOPBACK = "127.0.0.1"
GPU_SHARE = 0.8  # of the memory left over by weights, for the KV pools of all workers together
HOST_SHARE = 0.5
PROGRAM = (sys.executable, "-P", "-m", "cli.main")  # -P: a folder `cli` where the user stands is not ours

SettingsType = TypeVar("SettingsType", bound=Settings)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to start."""

    name: str  # unique in the service, such as "decode-0"
    command: tuple[str, ...]
    environment: Mapping[str, str]  # added to the supervisor's own, from which BATON_* is removed


def plan_workers(config: ServeConfig, program: tuple[str, ...] = PROGRAM) -> list[ChildSpec]:
    """The workers, prefill first."""
    total_share = GPU_SHARE if config.device == "cuda" else HOST_SHARE
    share = total_share / (config.prefill_workers + config.decode_workers)
    prefill = derive(PrefillConfig, config, max_running=config.prefill_max_running, kv_memory_share=share)
    decode = derive(DecodeConfig, config, max_running=config.decode_max_running, kv_memory_share=share)
    commands = {"prefill": (prefill, config.prefill_workers), "decode": (decode, config.decode_workers)}
    return [
        ChildSpec(f"{role}-{index}", (*program, role, *build_flags(settings)), secret_environment(config))
        for role, (settings, count) in commands.items()
        for index in range(count)
    ]


def plan_gateway(
    config: ServeConfig,
    served_name: str,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    program: tuple[str, ...] = PROGRAM,
) -> ChildSpec:
    """The gateway of workers at these addresses. Keys travel by environment: command lines are public."""
    settings = derive(
        GatewayConfig,
        config,
        host=config.host,
        port=config.port,
        served_name=served_name,
        api_key=(),
        prefill=prefill,
        decode=decode,
    )
    keys = {"BATON_API_KEY": ",".join(config.api_key)} if config.api_key else {}
    return ChildSpec("gateway", (*program, "gateway", *build_flags(settings)), keys | secret_environment(config))


def secret_environment(config: ServeConfig) -> dict[str, str]:
    """The fleet's secret, for every process of it."""
    return {"BATON_FLEET_SECRET": config.fleet_secret} if config.fleet_secret else {}


def pin_ports(spec: ChildSpec, ready: Ready) -> ChildSpec:
    """The same worker again, on the ports that it had: gateways and scrapers know it by them."""
    ports = {"port": ready.address, "metrics_port": ready.metrics_address}
    pinned = [f"{flag(name)}={address.rpartition(':')[2]}" for name, address in ports.items() if address]
    return replace(spec, command=(*spec.command, *pinned))


def derive(target: type[SettingsType], config: ServeConfig, **given: Any) -> SettingsType:
    """Settings of one process: what it shares by name with the service's, and what is given.

    Host and port of the service are the gateway's; workers listen on any free port of the loopback interface.
    The fleet's secret travels by environment.
    """
    shared = set(field_names(target)) & set(field_names(ServeConfig)) - {"host", "port", "fleet_secret"}
    return target(**{name: getattr(config, name) for name in shared} | {"host": LOOPBACK} | given)


def build_flags(settings: Settings) -> list[str]:
    """The flags that make a fresh process build equal settings; defaults are left out."""
    flags = []
    for item in fields(settings):
        value = getattr(settings, item.name)
        if value == item.default:
            continue
        if isinstance(value, tuple):
            flags += [f"{flag(item.name)}={one}" for one in value]
        elif isinstance(value, bool):
            flags.append(flag(item.name) if value else flag(f"no_{item.name}"))
        else:
            flags.append(f"{flag(item.name)}={value}")
    return flags
