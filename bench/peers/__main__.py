"""Baton beside other servers on this machine: `make bench-peers`, or

    python -m bench.peers install vllm lcpp ov hf      # each in an environment of its own, under build/peers
    python -m bench.peers convert                      # the model in the peers' formats
    python -m bench.peers run --rounds 5               # all groups of rows, and the tables of docs/BENCHMARKS.md
    python -m bench.peers run --groups bf16 --rows tpot,prefix --systems baton,llama.cpp --rounds 1

The servers of a group run at once and idle, and take turns: a machine's speed drifts, so only neighbours in time
compare. A round is one turn of each; what is told are medians of the rounds' ratios.
"""

import asyncio
import os
import platform
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyclopts import App

from bench.load.report import write_json
from bench.peers.documents import tell_group
from bench.peers.figures import put_between
from bench.peers.prepare import MODEL, convert, install
from bench.peers.rows import RowError, measure_row
from bench.peers.session import Places, Running, note_agreement, note_memory, open_group
from bench.peers.systems import GROUPS, PACKAGES, SYSTEMS, Group
from runtime.settings import ConfigError

app = App(help=__doc__, result_action="return_value")
PEERS, MODELS = Path("build/peers"), Path("build/models")
DOCUMENT = Path("docs/BENCHMARKS.md")


@app.command(name="install")
def install_peers(*names: str, peers_dir: Path = PEERS) -> None:
    """Install peers, all without names."""
    install(names or tuple(PACKAGES), peers_dir.resolve())


@app.command(name="convert")
def convert_model(*, peers_dir: Path = PEERS, models_dir: Path = MODELS) -> None:
    """Write the model and its forms."""
    convert(models_dir.resolve(), peers_dir.resolve())


@app.command
def run(
    *,
    groups: str = ",".join(GROUPS),
    rows: str = "",
    systems: str = "",
    rounds: int = 5,
    threads: int = 2,
    peers_dir: Path = PEERS,
    models_dir: Path = MODELS,
    out: Path = Path("build/bench-peers.json"),
    document: Path | None = None,
) -> None:
    """Measure, save after every round, and print the tables.

    Parameters
    ----------
    groups
        Which sets of systems, in this order.
    rows
        Only these rows of them.
    systems
        Only these systems of them; the first of a group is what others are compared with.
    rounds
        Turns of each system and row.
    threads
        Of each server.
    peers_dir
        Folder of the peers' environments.
    models_dir
        Folder of the model and its forms.
    out
        Everything measured, as JSON.
    document
        Put the tables between this file's markers, such as docs/BENCHMARKS.md.
    """
    chosen = choose(groups, rows, systems)
    model = convert(models_dir.resolve(), peers_dir.resolve())
    logs = out.resolve().parent / "bench-peers-logs"
    logs.mkdir(parents=True, exist_ok=True)
    places = Places(model, peers_dir.resolve(), logs, threads)
    result: dict[str, Any] = {
        "format": "baton-bench-peers/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "rounds": rounds,
        "model": MODEL,
        "groups": {},
    }
    for name, group in chosen.items():
        asyncio.run(run_group(name, group, places, rounds, result, out))
        text = tell_group(group, result["groups"][name], result)
        print(text)
        if document is not None:
            document.write_text(put_between(document.read_text(), name, text))


def choose(groups: str, rows: str, systems: str) -> dict[str, Group]:
    """The groups with only the rows and systems that are wanted. Raises ConfigError for unknown names."""
    known_rows = {row for group in GROUPS.values() for row in group.rows}
    for names, known in ((groups, set(GROUPS)), (rows, known_rows), (systems, set(SYSTEMS))):
        for name in filter(None, names.split(",")):
            if name not in known:
                raise ConfigError(f"{name} is not known: {', '.join(sorted(known))}")
    chosen = {}
    for name in groups.split(","):
        group = GROUPS[name]
        own_rows = tuple(row for row in group.rows if not rows or row in rows.split(","))
        own_systems = tuple(one for one in group.systems if not systems or one in systems.split(","))
        if own_rows and own_systems:
            chosen[name] = Group(group.title, own_systems, own_rows)
    return chosen


async def run_group(
    name: str, group: Group, places: Places, num_rounds: int, result: dict[str, Any], out: Path
) -> None:
    """Start the systems, and let them take turns; `result` grows and is saved."""
    async with open_group(group.systems, SYSTEMS, places) as (running, missing):
        rows: dict[str, dict[str, list[dict[str, Any]]]] = {
            row: {one.name: [] for one in running} for row in group.rows
        }
        facts = {one.name: one.facts for one in running}
        result["groups"][name] = {"systems": facts, "missing": missing, "rows": rows}
        for one in running:
            await measure(one, group.rows[0], 0)  # the first answers pay for first touches; not counted
        await note_agreement(running)
        for number in range(num_rounds):
            for row in group.rows:
                first = number % max(len(running), 1)  # everyone is the first once
                for one in (*running[first:], *running[:first]):
                    rows[row][one.name].append(await measure(one, row, number + 1))
            note_memory(running)
            write_json(result, out)


async def measure(one: Running, row: str, seed: int) -> dict[str, Any]:
    """One turn. A failure is a figure, too, and does not end the run."""
    try:
        figures: dict[str, Any] = await measure_row(row, one.target, seed)
    except (RowError, ConfigError) as error:
        figures = {}
        print(f"{one.name}, {row}: {error}", file=sys.stderr, flush=True)
    told = "  ".join(f"{name} {value:.1f}" for name, value in figures.items())
    print(f"{seed:3} {row:15} {one.name:16} {told}", file=sys.stderr, flush=True)
    return figures


def describe_machine() -> dict[str, Any]:
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpus[0] if cpus else "",
        "num_cores": os.cpu_count(),
        "memory_bytes": memory,
        "system": platform.platform(),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # which ends the servers, too
    try:
        app()
    except ConfigError as error:
        sys.exit(f"bench.peers: {error}")
