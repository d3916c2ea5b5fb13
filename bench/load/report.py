"""Saved figures as tables, and their files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.load.metrics import PHASES
from bench.load.runs import FORMAT
from runtime.settings import ConfigError


def name_load(run: Mapping[str, Any]) -> str:
    return f"{run['max_concurrency']} at once" if run["max_concurrency"] else f"{float(run['request_rate']):g}/s"


def build_table(result: Mapping[str, Any]) -> Table:
    """One row per run."""
    runs: Sequence[Mapping[str, Any]] = result["levels"]
    has_goodput = runs[0]["request_goodput"] is not None
    has_use = any("mbu" in run for run in runs)
    columns = ["load", "done", "failed", "tokens/s", "req/s", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99"]
    columns += ["goodput/s"] * has_goodput + ["MBU", "MFU"] * has_use
    table = Table(title=f"{result['label']}: {result['server']['model']} (times in ms)", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "load" else "right")
    for run in runs:
        times = [
            f"{run[f'{part}_{name}_ms']:.{0 if name == 'ttft' else 1}f}"
            for name in ("ttft", "tpot", "itl")
            for part in ("median", "p99")
        ]
        rates = [f"{run['output_throughput']:.1f}", f"{run['request_throughput']:.2f}"]
        row = [name_load(run), str(run["completed"]), str(run["failed"]), *rates, *times]
        row += [f"{run['request_goodput']:.2f}"] if has_goodput else []
        row += [f"{run.get(name, 0):.0%}" for name in ("mbu", "mfu")] if has_use else []
        table.add_row(*row)
    return table


def build_phases(result: Mapping[str, Any]) -> Table | None:
    """Baton's own clocks, mean ms per answer; None for other servers."""
    runs = [run for run in result["levels"] if f"mean_{PHASES[0]}_ms" in run]
    if not runs:
        return None
    table = Table("load", *(phase.replace("_", " ") for phase in PHASES), title="Phases, mean ms", title_justify="left")
    for run in runs:
        table.add_row(name_load(run), *(f"{run[f'mean_{phase}_ms']:.1f}" for phase in PHASES))
    return table


def list_errors(result: Mapping[str, Any]) -> list[str]:
    """Each error once."""
    return sorted({error for run in result["levels"] for error in run["errors"] if error})


def build_interference(figures: Mapping[str, Any]) -> Table:
    """Gaps with and without long prompts, and these prompts' TTFT."""
    table = Table("", "ITL, ms", "/ quiet median")
    quiet = figures["quiet_median_itl_ms"]
    for name in ("quiet_median", "quiet_p99", "busy_median", "busy_p99", "busy_max"):
        value = figures[f"{name}_itl_ms"]
        table.add_row(name.replace("_", ", "), f"{value:.1f}", f"{value / quiet:.2f}")
    table.caption = "TTFT of the long prompts: " + ", ".join(f"{time:.0f} ms" for time in figures["long_ttft_ms"])
    return table


def describe_by_text(figures: Mapping[str, Any]) -> str:
    """Gaps beside images by those beside texts of as many tokens, which are in the second table."""
    names = {"p99_by_text": "p99", "max_by_text": "longest"}
    ratios = [f"{name} {median(figures[key]):.2f} ({min(figures[key]):.2f} to {max(figures[key]):.2f})"
              for key, name in names.items()]  # fmt: skip
    return f"gaps beside images / beside texts of as many tokens, medians of rounds: {', '.join(ratios)}"


def build_contexts(figures: Sequence[Mapping[str, Any]]) -> Table:
    """One row per length."""
    table = Table(caption="times in ms; wait: the longest of a short request beside these")
    columns = ["prompt tokens", "TTFT", "TPOT", "next TTFT", "wait", "gateway MiB", "workers MiB"]
    for column in columns[: len(figures[0])]:
        table.add_column(column, justify="right")
    for one in figures:
        digits = {name: 1 if name in ("tpot_ms", "longest_wait_ms") else 0 for name in one}
        table.add_row(*(f"{value:.{digits[name]}f}" for name, value in one.items()))
    return table


def build_agents(figures: Mapping[str, Any]) -> Table:
    """One row per turn, and one for all."""
    table = Table(title="TTFT in ms; shares of the prompts' tokens", title_justify="left")
    for column in ("turn", "requests", "TTFT p50", "p90", "tokens", "seen before", "cached", "computed twice"):
        table.add_column(column, justify="right")
    for row in (*figures["turns"], {"turn": "all", **figures["all"]}):
        times = (f"{row[name]:.0f}" for name in ("median_ttft_ms", "p90_ttft_ms"))
        shares = (f"{row[name]:.1%}" for name in ("seen_share", "cached_share", "computed_twice_share"))
        table.add_row(str(row["turn"]), str(row["requests"]), *times, str(row["prompt_tokens"]), *shares)
    counts = ", ".join(f"{name} {count}" for name, count in figures["sources"].items())
    table.caption = f"tokens of prompts by where their KV came from: {counts}" if counts else None
    return table


def build_priorities(figures: Mapping[str, Any]) -> Table:
    """Table of answers, refusals and TTFT by priority."""
    table = Table(
        "priority", "sent", "answered", "refused", "TTFT p50", "max", title="times in ms", title_justify="left"
    )
    for row in figures["priorities"]:
        times = (f"{row[name]:.0f}" for name in ("median_ttft_ms", "max_ttft_ms"))
        table.add_row(*(str(row[name]) for name in ("priority", "sent", "answered", "refused")), *times)
    return table


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError if it cannot be written."""
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"save={str(path)!r} cannot be written: {error}") from error


def load(path: Path) -> dict[str, Any]:
    """A saved file. Raises ConfigError if it is not one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or not found.get("levels"):
        raise ConfigError(f"{path} is no file of `baton bench serve --save`")
    return found
