"""`baton bench`: what it can measure. One file for the commands of each kind."""

from cyclopts import App

from cli.bench_load import interference, plot, serve
from cli.bench_simulate import simulate, steps
from runtime.hardware import wait_without_spinning

bench = App(name="bench", help="Measure servers and kernels, and simulate fleets.", config=())
bench.command(serve)
bench.command(interference)
bench.command(plot)
bench.command(simulate)
bench.command(steps)


@bench.command
def kernels(*, threads: int = 0, rounds: int = 15) -> int:
    """Measure this CPU's kernels beside torch's and the machine's ceilings.

    Parameters
    ----------
    threads
        Threads to compute with; 0 is one for each core.
    rounds
        Rounds in which all that is compared takes turns.
    """
    wait_without_spinning()
    from bench.kernels import run_kernels  # here, so that other commands do not wait for torch

    run_kernels(threads, rounds)
    return 0
