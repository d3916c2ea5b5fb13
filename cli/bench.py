"""`baton bench` and `baton plan`: options in; the work is done in bench/.

Imports that need torch stand in the functions, so that other commands need not wait for it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter, Token, convert

from bench.load.command import agents, contexts, interference, overload, plot, serve
from bench.roofline import SHAPES
from bench.simulate.settings import FleetSettings, Workload
from cli.service import CommandError
from engine.catalogue import build_config, load_config
from runtime.gpus import CARDS, CardName
from runtime.hardware import wait_without_spinning
from runtime.settings import ConfigError
from worker.startup.limits import ModelShape, shape_of
from worker.startup.models import fetch_tokenizer


def take_lower_case(hint: Any, tokens: Sequence[Token]) -> Any:
    """An option's value, however it is capitalised: plans show H100 for h100."""
    return convert(hint, [token.evolve(value=token.value.lower()) for token in tokens])


def load_shape(model: str) -> ModelShape:
    """A folder, a hub id, "demo" or a key of SHAPES. ConfigError or ValueError says what is wrong with it."""
    return shape_of(build_config(SHAPES[model]) if model in SHAPES else load_config(Path(fetch_tokenizer(model))))


Gpu = Annotated[CardName, Parameter(converter=take_lower_case)]
REQUESTS, WORKERS = Workload(), FleetSettings()

bench = App(name="bench", help="Measure servers and kernels, and simulate fleets.")
bench.command(serve)
bench.command(interference)
bench.command(overload)
bench.command(contexts)
bench.command(agents)
bench.command(plot)


@bench.command
def simulate(
    workload: Annotated[Workload, Parameter(name="*")] = REQUESTS,
    fleet: Annotated[FleetSettings, Parameter(name="*")] = WORKERS,
    *,
    model: str = "8B",
    gpu: Gpu = "h100",
    costs: Path | None = None,
    ttft: float = 500.0,
    tpot: float = 50.0,
    colocated: bool = False,
    times: tuple[int, ...] = (1,),
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Simulate a fleet with the real routing, batching and caches, and a model of what a step takes.

    Args:
        model: Whose shape: a folder, a hub id, demo, or 1B, 8B, 70B.
        gpu: Whose data sheet.
        costs: Measured steps of every worker (baton bench steps), instead of the roofline's.
        ttft: Goal for the time to the first token, in ms.
        tpot: Goal for the time per token after it, in ms.
        colocated: Simulate also as many GPUs whose workers all do both.
        times: Simulate so many times the workers, requests and rate; repeat for several.
        as_json: Print JSON instead of a table.
    """
    from bench.simulate import command
    from bench.simulate.costs import fit, load

    try:
        measured = fit(load(costs)) if costs is not None else None
        wanted = command.build_fleet(fleet, load_shape(model), CARDS[gpu], measured)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    found = command.simulate_all(wanted, workload, times, colocated, ttft / 1e3, tpot / 1e3)
    command.show(dict(found), as_json)
    return 0


@bench.command
def steps(out: Path, /, *, model: str = "demo", device: str = "auto", dtype: str = "auto", threads: int = 0) -> int:
    """Measure real steps of the engine here, and write them for `baton bench simulate --costs`.

    Args:
        out: File to write, JSON.
        model: Folder of a checkpoint, a hub id, or demo.
        device: Where to compute: auto, cpu or cuda.
        dtype: Number type: auto, float32, bfloat16 or float16.
        threads: CPU threads; 0 is one per core.
    """
    from bench.simulate import command

    command.measure(out, model, device, dtype, threads)
    return 0


@bench.command
def kernels(*, threads: int = 0, rounds: int = 15, plot: Path | None = None) -> int:
    """Measure this CPU's kernels beside torch's and the machine's ceilings.

    Args:
        threads: Threads to compute with; 0 is one for each core.
        rounds: Rounds in which everything compared takes turns.
        plot: Draw a roofline here, as PNG or SVG; needs matplotlib (pip install 'baton[bench]').
    """
    wait_without_spinning()
    from bench.kernels import run_kernels

    run_kernels(threads, rounds, plot)
    return 0


def plan(
    *,
    model: str,
    gpu: Gpu,
    num_gpus: int = 8,
    rate: float = 1.0,
    input_tokens: Annotated[int, Parameter(name="--input")] = 1000,
    output_tokens: Annotated[int, Parameter(name="--output")] = 200,
    ttft: float = 1000.0,
    tpot: float = 50.0,
) -> int:
    """Propose workers for a model on given GPUs. Computed from data sheets, nothing is measured.

    Args:
        model: Folder of a checkpoint, a hub id, demo, or 1B, 8B, 70B.
        gpu: Kind of GPU.
        num_gpus: How many there are; with too few for two roles, decode workers compute prompts too.
        rate: Requests a second, arriving at random.
        input_tokens: Tokens of a prompt.
        output_tokens: Tokens of an answer.
        ttft: Goal for the time to the first token, in ms, for nine of ten requests.
        tpot: Goal for the time per token after it, in ms, likewise.
    """
    from bench.capacity import Goals, UnreachableError, propose
    from bench.proposal import describe, describe_assumptions, describe_start

    try:
        shape = load_shape(model)
        goals = Goals(rate, input_tokens, output_tokens, ttft / 1e3, tpot / 1e3)
        found = propose(shape, CARDS[gpu], goals, num_gpus)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    except UnreachableError as error:
        raise CommandError(f"these goals cannot be met (limit: {error.limit}): {error}") from error
    print(
        *describe_assumptions(shape, gpu, CARDS[gpu]), *describe(found), *describe_start(model, shape, found), sep="\n"
    )
    return 0
