"""A group's figures as Markdown for docs/BENCHMARKS.md. Pure."""

from collections.abc import Mapping
from typing import Any

from bench.peers.figures import build_table
from bench.peers.systems import Group


def describe_group(group: Group, found: Mapping[str, Any]) -> str:
    """Title, machine, the table, and the servers' facts. bench/peers/systems.py has how they are started."""
    memory = found["memory_bytes"] / 2**30
    systems = [name for name in group.systems if name in found["systems"]]
    parts = [
        f"### {group.title}",
        f"{found['cpu']}, {found['num_cores']} cores, {memory:.0f} GiB; {found['date'][:10]}; "
        f"rounds: {found['rounds']}, threads of each server: {found['threads']}.",
    ]
    if systems:
        parts += [build_table(found["rows"], systems), build_facts(found["systems"], systems)]
    parts += [f"Not measured: {name} ({reason})" for name, reason in found["missing"].items()]
    return "\n\n".join(parts)


def build_facts(systems: Mapping[str, Mapping[str, Any]], names: list[str]) -> str:
    """One line per system: its version, start time and memory."""
    lines = ["| | version | start, s | memory (PSS) | idle CPU | agrees |", "|---" * 6 + "|"]
    for name in names:
        facts = systems[name]
        memory = f"{facts['pss_bytes'] / 2**30:.1f} GiB" if "pss_bytes" in facts else "-"
        agrees = f"{facts['agreement']:.0%}" if "agreement" in facts else "-"
        lines.append(
            f"| {name} | {facts['version']} | {facts['ready_s']:.0f} | {memory} | {facts['idle_cpu']:.0%} | {agrees} |"
        )
    return "\n".join(lines)
