"""A whole service with counters that depend on its requests alone: pauses of a busy machine do not count as deaths."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.live import Live, serve
from tests.support.under_load import wait_until

CALM = ("--heartbeat-s=60", "--lease-s=120", "--stall-s=120")


@contextmanager
def serve_calmly(model: Path | str, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Live]:
    """`bench.live.serve`; the gateway knows all workers before the first request."""
    with serve(model, *CALM, *flags, env=env) as live:
        wait_until(lambda: all(worker["alive"] for worker in live.workers()), "all workers are alive")
        yield live
