"""`baton bench`: what it can measure. One file for the commands of each kind."""

from cyclopts import App

from cli.bench_load import interference, plot, serve

bench = App(name="bench", help="Measure servers with an OpenAI-compatible API.", config=())
bench.command(serve)
bench.command(interference)
bench.command(plot)
