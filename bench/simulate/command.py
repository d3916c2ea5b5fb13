"""The simulation commands of `baton bench`: build the fleet, run simulations, measure steps, show figures."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.roofline import build_costs, handoff_token_s, kv_tokens_that_fit
from bench.simulate.channels import Wires
from bench.simulate.costs import Costs, fit, mean_error, save
from bench.simulate.figures import summarise
from bench.simulate.hosts import Troubles
from bench.simulate.measure import CONTEXT_TOKENS, STREAMS, measure_steps
from bench.simulate.run import Fleet, Simulation, Workers, colocate
from bench.simulate.settings import FleetSettings, Workload
from bench.simulate.worker import Limits
from bench.simulate.workload import build_conversations
from engine.compose import build_engine
from runtime.gpus import Card
from runtime.hardware import num_cores, resolve_threads
from worker.peers.pools import MAX_OFFER_BYTES
from worker.startup.limits import Limits as RowLimits
from worker.startup.limits import ModelShape
from worker.startup.models import locate_model
from worker.table import num_rows_for

PAGE_TOKENS = 16
Figures = dict[str, float]


def build_fleet(settings: FleetSettings, model: ModelShape, gpu: Card, costs: Costs | None = None) -> Fleet:
    """`costs`: measured ones for every worker instead of the roofline's. ValueError if the model does not fit."""
    chunks = settings.chunk_tokens, settings.local_prefill_chunk_tokens
    roles = [
        (settings.prefill_workers, settings.prefill_tp, settings.prefill_max_running, chunks[0]),
        (settings.decode_workers, settings.decode_tp, settings.decode_max_running, chunks[1]),
    ]
    built = []
    for count, tp, max_running, chunk in roles:
        kv_tokens = settings.kv_tokens or kv_tokens_that_fit(model, gpu, tp, RowLimits(max_running, chunk))
        if kv_tokens < settings.page_tokens:
            raise ValueError(f"the weights do not fit with {tp} GPUs a worker: set --prefill-tp and --decode-tp")
        num_pages = min(kv_tokens, max_running * model.context_tokens) // settings.page_tokens
        offer = max(MAX_OFFER_BYTES // (model.kv_token_bytes * settings.page_tokens), 1)
        limits = Limits(num_pages, max_running, chunk, settings.page_tokens, offer)
        built.append(Workers(count, tp, costs or build_costs(model, gpu, tp), limits))
    wires = Wires(handoff_token_s(model, gpu, settings.decode_tp))
    prefill, decode = built
    if changes_roles := settings.roles == "auto":
        limits = replace(decode.limits, chunk_tokens=chunks[0], beside_tokens=chunks[1])
        decode = replace(decode, limits=limits)
    troubles = Troubles(settings.deaths_per_hour, settings.restart_s, settings.rollout_at_s)
    return Fleet(
        prefill, decode, wires, settings.local_prefill_max_tokens, settings.cache_routing, changes_roles, troubles
    )


def multiply(fleet: Fleet, factor: int) -> Fleet:
    prefill, decode = (replace(role, count=role.count * factor) for role in (fleet.prefill, fleet.decode))
    return replace(fleet, prefill=prefill, decode=decode)


def simulate_all(
    fleet: Fleet, workload: Workload, times: tuple[int, ...], has_colocated: bool, ttft_s: float, tpot_s: float
) -> Iterator[tuple[str, Figures]]:
    """(workers, figures) of each run."""
    for factor in times:
        wanted = replace(workload, num_requests=workload.num_requests * factor, rate=workload.rate * factor)
        one = multiply(fleet, factor)
        for each in [one, colocate(one)] if has_colocated else [one]:
            simulation = Simulation(each, build_conversations(wanted))
            figures = summarise(simulation.run(), ttft_s, tpot_s)
            simulation.check()
            yield f"{each.prefill.count} + {each.decode.count}", figures


def show(found: dict[str, Figures], as_json: bool) -> None:
    """One column per run."""
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table("prefill + decode workers", *found)
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        table.add_row(name, *(f"{figures[name]:.5g}" if name in figures else "" for figures in found.values()))
    Console().print(table)


def measure(out: Path, model: str, device: str, dtype: str, threads: int) -> None:
    """Write measured steps, and print their fit."""
    folder, threads = locate_model(model), resolve_threads(threads, num_cores())
    pages, no_progress = -(-CONTEXT_TOKENS // PAGE_TOKENS), lambda _done, _total: None
    engine = build_engine(
        folder, "", dtype, device, threads, PAGE_TOKENS, num_rows_for(max(STREAMS)),
        lambda *_sizes: (max(STREAMS) * pages, 0), no_progress, pages * PAGE_TOKENS,
    )  # fmt: skip
    engine.warm_up(max(STREAMS))
    steps = measure_steps(engine)
    save(out, {"model": model, **engine.describe()}, steps)
    found = fit(steps)
    print(f"{len(steps)} steps; {found}; mean error {mean_error(found, steps):.1%}")
