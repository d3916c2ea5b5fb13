"""`baton bench serve`, `interference`, `overload`, `contexts`, `agents` and `plot`: options in, tables out."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.load.agents import AgentOptions, run_agents
from bench.load.answers import Answer
from bench.load.ceilings import Ceilings, ModelSize, measure_use
from bench.load.contexts import ContextOptions, run_contexts
from bench.load.interference import InterferenceOptions, run_interference
from bench.load.loops import Done
from bench.load.machine import find_ceilings, read_model_size
from bench.load.options import ServeOptions
from bench.load.overload import OverloadOptions, describe, run_overload
from bench.load.report import (
    build_agents,
    build_contexts,
    build_interference,
    build_phases,
    build_priorities,
    build_table,
    describe_by_text,
    list_errors,
    load,
    write_json,
)
from bench.load.runs import run_levels
from runtime.settings import ConfigError

WIDTH = 160  # characters of a line where no terminal has a width


def serve(options: Annotated[ServeOptions, Parameter(name="*")] = ServeOptions()) -> int:  # noqa: B008  frozen
    """Measure TTFT, TPOT, ITL and throughput under load, by vLLM's definitions."""
    if options.plot:
        load_plots(options.plot)  # fail before the work
    size = read_model_size(options.checkpoint) if options.checkpoint else None
    ceilings = find_ceilings(options.peak_gbs, options.peak_tflops) if size else None
    with open_progress() as progress:
        result = asyncio.run(run_levels(options, lambda name, total: _start(progress, name, total)))
    if size and ceilings:
        add_use(result, size, ceilings)
    if options.save:  # before printing, which fails if the reader is gone
        write_json(result, options.save)
    show(result)
    if options.plot:
        load_plots(options.plot).draw([result], options.plot)
    return _tell("serve", list_errors(result))


def plot(files: Annotated[tuple[Path, ...], Parameter(negative="")], /, *, plot: Path) -> int:
    """Draw saved files of `baton bench serve` into one picture, a curve for each.

    Parameters
    ----------
    files
        Written by --save.
    plot
        The picture, as PNG or SVG.
    """
    results = [load(file) for file in files]
    for result in results:
        show(result)
    load_plots(plot).draw(results, plot)
    return 0


def interference(
    options: Annotated[InterferenceOptions, Parameter(name="*")] = InterferenceOptions(),  # noqa: B008  frozen
    *,
    save: Path | None = None,
) -> int:
    """Measure what long prompts do to running streams.

    Parameters
    ----------
    save
        Write the figures here, as JSON.
    """
    figures = asyncio.run(run_interference(options))
    if save:
        write_json(figures, save)
    Console().print(build_interference(figures))
    if "text" in figures:
        Console().print(build_interference(figures["text"]), describe_by_text(figures))
    if figures["has_stream_ended_early"]:
        print("baton bench: a stream ended before the prompts did: set --stream-tokens higher", file=sys.stderr)
    return 1 if figures["has_stream_ended_early"] else 0


def overload(
    options: Annotated[OverloadOptions, Parameter(name="*")] = OverloadOptions(),  # noqa: B008  frozen
    *,
    save: Path | None = None,
) -> int:
    """Send more requests than the server can answer, and measure who gets what.

    Parameters
    ----------
    save
        Write the figures here, as JSON.
    """
    with open_progress() as progress:
        figures = asyncio.run(run_overload(options, _start(progress, "overload", 0)))
    if save:
        write_json(figures, save)
    console = Console()
    console.print(describe(figures), markup=False)
    console.print(build_priorities(figures))
    return _tell("overload", figures["errors"])


def contexts(
    options: Annotated[ContextOptions, Parameter(name="*")] = ContextOptions(),  # noqa: B008  frozen
    *,
    save: Path | None = None,
) -> int:
    """Measure what a context's length costs: conversations and their next turns, other requests' waits, and memory.

    Parameters
    ----------
    save
        Write the figures here, as JSON.
    """
    figures = asyncio.run(run_contexts(options))
    if save:
        write_json({"contexts": figures}, save)
    Console().print(build_contexts(figures))
    return 0


def agents(
    options: Annotated[AgentOptions, Parameter(name="*")] = AgentOptions(),  # noqa: B008  frozen
    *,
    save: Path | None = None,
) -> int:
    """Send sessions of agents, whose turns repeat all before them, and measure what is computed twice.

    Parameters
    ----------
    save
        Write the figures here, as JSON.
    """
    with open_progress() as progress:
        figures = asyncio.run(run_agents(options, lambda name, total: _start(progress, name, total)))
    if save:
        write_json(figures, save)
    Console().print(build_agents(figures))
    return _tell("agents", figures["errors"])


def open_progress() -> Progress:
    """A bar for each run, on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def add_use(result: dict[str, Any], size: ModelSize, ceilings: Ceilings) -> None:
    """MBU and MFU of every run."""
    for run in result["levels"]:
        run.update(measure_use(size, ceilings, run))
    result["machine"] = {"peak_gbs": ceilings.bytes_per_s / 1e9, "peak_tflops": ceilings.flops / 1e12}


def show(result: Mapping[str, Any]) -> None:
    """The tables, and the workload below them."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(build_table(result))
    phases = build_phases(result)
    if phases:
        console.print(phases)
    workload = result["workload"]
    console.print(
        f"{workload['dataset']}, {workload['arrivals']}, prompts as {workload['prompts']}, seed {workload['seed']}; "
        f"{workload['warm_up_requests']} warm-up requests are not counted",
        markup=False,
    )


def _tell(command: str, errors: Sequence[str]) -> int:
    """Print the errors, each on a line; returns the exit status."""
    for error in errors:
        print(f"baton bench {command}: {error}", file=sys.stderr)
    return 1 if errors else 0


def _start(progress: Progress, name: str, total: int) -> Done:
    task = progress.add_task(name, total=total or None)

    def done(_answer: Answer) -> None:
        progress.advance(task)

    return done


def load_plots(path: Path) -> ModuleType:
    """`bench.load.plots`. Raises ConfigError."""
    try:
        from bench.load import plots  # an extra: matplotlib is imported only when asked for
    except ImportError as error:
        raise ConfigError(f"plot={str(path)!r} needs matplotlib ({error}): pip install 'baton[bench]'") from error
    return plots
