"""Baton beside other servers on this machine: `make bench-peers`, or

    python -m bench.peers install vllm lcpp ov hf      # each in its own environment, under build/peers
    python -m bench.peers convert                      # the model in the peers' formats
    python -m bench.peers run --rounds 5               # all groups of rows, and the tables of docs/BENCHMARKS.md
    python -m bench.peers run --groups bf16 --rows tpot,prefix --systems baton,llama.cpp --rounds 1
    python -m bench.peers plot                         # docs/interference.svg, from these tables

The servers of a group run at once, idle, and take turns: a machine's speed drifts, so only measurements close in time
compare. A round is one turn of each; the tables show medians of the rounds' ratios.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from cyclopts import App

from bench.peers.documents import describe_group
from bench.peers.figures import put_between, read_row
from bench.peers.prepare import convert, install
from bench.peers.session import Places
from bench.peers.systems import GROUPS, PACKAGES, SYSTEMS, Group
from bench.peers.turns import FORMAT, run_group
from runtime.settings import ConfigError

app = App(help=__doc__, result_action="return_value", suppress_keyboard_interrupt=False)
INTERFERENCE = ("quiet median itl", "busy max itl", "mean long ttft")
PEERS, MODELS = Path("build/peers"), Path("build/models")


@app.command(name="install")
def install_peers(*names: str, peers_dir: Path = PEERS) -> None:
    """Install peers; without names, all."""
    install(names or tuple(PACKAGES), peers_dir.resolve())


@app.command(name="convert")
def convert_model(*, peers_dir: Path = PEERS, models_dir: Path = MODELS) -> None:
    """Write the model and its conversions."""
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
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} cannot be used: 1 or more")
    chosen = choose(groups, rows, systems)
    logs = out.resolve().parent / "bench-peers-logs"
    logs.mkdir(parents=True, exist_ok=True)
    places = Places(convert(models_dir.resolve(), peers_dir.resolve()), peers_dir.resolve(), logs, threads)
    result = read_result(out)
    for name, group in chosen.items():
        asyncio.run(run_group(name, group, places, rounds, result, out))
        text = describe_group(group, result["groups"][name])
        print(text, flush=True)
        if document is not None:
            document.write_text(put_between(document.read_text(), name, text))


@app.command
def plot(*, document: Path = Path("docs/BENCHMARKS.md"), out: Path = Path("docs/interference.svg")) -> None:
    """Draw what long prompts do to streams, from the tables between a document's markers."""
    from bench.load.plots import draw_interference  # an extra: matplotlib is imported only when asked for

    text = document.read_text()
    groups = {
        title: [read_row(text, name, f"interference: {label}") for label in INTERFERENCE]
        for title, name in (("defaults", "bf16"), ("another run, also with vLLM tuned to 256 tokens a step", "chunks"))
    }
    draw_interference(groups, out)


def read_result(out: Path) -> dict[str, Any]:
    """The results of earlier runs, so that groups not measured again stay; empty if there are none."""
    found = json.loads(out.read_bytes()) if out.exists() else {}
    return found if found.get("format") == FORMAT else {"format": FORMAT, "groups": {}}


def choose(groups: str, rows: str, systems: str) -> dict[str, Group]:
    """The groups, limited to the requested rows and systems. Raises ConfigError for unknown names."""
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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # which also ends the servers
    try:
        app()
    except ConfigError as error:
        sys.exit(f"bench.peers: {error}")
    except KeyboardInterrupt:
        sys.exit("bench.peers: ended by a signal; the rounds that were complete are saved")
