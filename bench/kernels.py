"""CPU kernels against the machine's ceilings: products, attention, sampling, page transfer.

Rounds alternate between all contenders, on the shapes of Llama-3.2-1B; figures are medians, ratios medians of rounds'
ratios. The transfer is the shm reader's copy into a pool, next to a plain copy of the same size.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import attention, sampling
from bench.load.command import load_plots
from bench.products import Calls, Ceilings, Products, Rate, cycle, measure_ceilings, rate, take_turns
from engine.compose import choose_attention
from engine.cpu.cpu_sampling import sample_on_cpu as sample
from engine.cpu.packed import can_pack
from engine.kv.pool import Pool, PoolShape
from kvtransfer.reader import Local, PageRef
from kvtransfer.shm import ShmReader
from protos import kv_pb2
from runtime.hardware import num_cores, resolve_threads
from runtime.rpc import open_channel
from wire.kv_layout import LAYERS, KvPart

BF16 = torch.bfloat16
GROUPS = ("int4", "4-bit groups", "8-bit groups")
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
ATTENTION = (
    *(attention.Case("decode", 16, 1, context) for context in (1024, 4096)),
    *(attention.Case("prefill", 1, 512, context) for context in (512, 1024, 8192, 32768)),
)
HANDED_PAGES = 128  # of 512 KiB
Points = dict[str, list[tuple[str, float, float]]]  # kernel |-> [(label, bytes a second, operations a second)]


def run_kernels(threads: int, rounds: int, plot: Path | None = None) -> None:
    """Print the tables, and draw a roofline. threads: 0 for all cores. Raises ConfigError."""
    plots, points = load_plots(plot) if plot else None, Points()
    torch.set_num_threads(resolve_threads(threads, num_cores()))
    console = Console()
    with Progress(transient=True, console=console) as progress:
        task = progress.add_task("the machine's ceilings", total=len(ROWS) + 4)

        def report(what: str) -> None:
            progress.update(task, advance=1, description=what)

        ceilings = measure_ceilings(torch.get_num_threads()) if can_pack() else None
        tables = build_products(ceilings, rounds, report, points) if ceilings else []
        attend = partial(build_attention, ceilings=ceilings, points=points)
        for name, build in (("attention", attend), ("sampling", build_sampling), ("hand-off", build_hand_off)):
            report(name)
            tables.append(build(rounds))
    found = ceilings.describe() if ceilings else "no C++ compiler: torch multiplies"
    console.print(f"{torch.get_num_threads()} threads; {found}")
    for table in tables:
        console.print(table)
    if plots and ceilings:
        plots.draw_roofline(ceilings.num_bytes, ceilings.named(), points, plot)


def relate(seconds: Mapping[str, list[float]], name: str, base: str) -> str:
    """Median of the rounds' ratios."""
    return f"{median(a / b for a, b in zip(seconds[name], seconds[base], strict=True)):.2f}"


def build_products(ceilings: Ceilings, rounds: int, report: Callable[[str], None], points: Points) -> list[Table]:
    heads = ("rows", "bf16 ms", "GB/s", "GFLOP/s", "x torch", "int8 ms", "GB/s", "GOP/s", "x bf16", "")
    table = Table(*heads, box=None, title="products; % of what the machine reads, of what registers multiply")
    groups = Table("rows", box=None, title="weights in groups of 32; rows/s, x bf16")
    for name in GROUPS:
        groups.add_column(f"{name} ms")
        groups.add_column("x bf16")
    products = Products()
    for num_rows in ROWS:
        report(f"products of {num_rows} rows")
        seconds = take_turns(products.calls(num_rows), rounds)
        taken = {name: median(values) for name, values in seconds.items()}
        bf16, int8 = (rate(num_rows, taken[name], ceilings, name == "int8") for name in ("bf16", "int8"))
        table.add_row(
            str(num_rows), f"{taken['bf16'] * 1e3:.2f}", *describe_rate(bf16), relate(seconds, "bf16", "torch"),
            f"{taken['int8'] * 1e3:.2f}", *describe_rate(int8), relate(seconds, "int8", "bf16"),
            "slow" if bf16.is_slow or int8.is_slow else "",
        )  # fmt: skip
        for name, of in (("products, bf16", bf16), ("products, int8", int8)):
            points.setdefault(name, []).append((str(num_rows), of.num_bytes, of.operations))
        cells = [(f"{taken[name] * 1e3:.2f}", relate(seconds, "bf16", name)) for name in GROUPS]
        groups.add_row(str(num_rows), *chain.from_iterable(cells))
    return [table, groups]


def describe_rate(one: Rate) -> tuple[str, str]:
    return f"{one.num_bytes / 1e9:.1f} {one.reading:4.0%}", f"{one.operations / 1e9:.0f} {one.multiplying:4.0%}"


def build_attention(rounds: int, ceilings: Ceilings | None = None, points: Points | None = None) -> Table:
    table = Table("", "SDPA, contiguous KV, ms", "paged, ms", "x SDPA", "GB/s", "GFLOP/s", title="attention, one layer")
    for case in ATTENTION:
        batch, heads, pool = attention.build_case(case, BF16)
        backend = choose_attention(attention.SHAPE, [None], torch.device("cpu"), BF16).backend
        backend.plan(pool, batch)
        layers = range(pool.shape[LAYERS])
        sdpa = attention.contiguous_sdpa(case, heads.ready()[0], len(layers))
        calls: Calls = {
            "sdpa": cycle([partial(sdpa, layer) for layer in layers]),
            "paged": cycle([partial(backend.attend, layer, heads, None) for layer in layers]),
        }
        seconds = take_turns(calls, rounds)
        taken = median(seconds["paged"])
        rates = case.num_bytes(BF16) / taken, case.operations / taken
        label = f"{case.num_sequences} x {case.query_len} at {case.context_len}"
        if points is not None:
            points.setdefault(f"attention, {case.phase}", []).append((label, *rates))
        limits = (ceilings.num_bytes, ceilings.operations[False]) if ceilings else (inf, inf)
        table.add_row(
            f"{case.phase}, {label}", *(f"{median(seconds[name]) * 1e3:.2f}" for name in calls),
            relate(seconds, "paged", "sdpa"),
            *(f"{rate / 1e9:.1f} {rate / limit:4.0%}" for rate, limit in zip(rates, limits, strict=True)),
        )  # fmt: skip
    return table


def build_sampling(rounds: int) -> Table:
    table = Table("", "ms", title=f"sampling, {sampling.NUM_ROWS} rows of {sampling.VOCABULARY}")
    logits = torch.randn(sampling.NUM_ROWS, sampling.VOCABULARY)
    for name in ("greedy", "temperature 1", "top_p 0.95"):
        batch = sampling.build_batch(sampling.CASES[name])
        table.add_row(name, f"{sampling.time_ms(sample, logits, batch, rounds):.2f}")
    return table


def build_hand_off(rounds: int) -> Table:
    table = Table("", "GB/s", "x copy", title=f"hand-off, {HANDED_PAGES} pages")
    shape = PoolShape(2 * HANDED_PAGES, (KvPart(num_layers=8, num_heads=8, head_dim=128),), 16, BF16)  # 512 KiB a page
    theirs, ours = (Pool(shape, lends=lends) for lends in (True, False))
    num_bytes = HANDED_PAGES * ours.page_bytes
    source, target = (torch.empty(num_bytes, dtype=torch.uint8).fill_(1) for _ in range(2))
    with asyncio.Runner() as runner:
        local = Local(ours, "bench", ShmReader.name, open_channel, True, False, timeout_s=60)
        peer = kv_pb2.Peer(
            num_pages=theirs.num_pages, pool_fd=theirs.fd, pages_offset=theirs.pages_offset,
            ranks=[kv_pb2.Rank(pid=os.getpid())],
        )  # fmt: skip
        reader = ShmReader(local, peer)
        pages = list(range(HANDED_PAGES))
        calls: Calls = {
            "plain copy": lambda _number: target.copy_(source),
            "shm": lambda _number: runner.run(reader.read([PageRef(page, 0) for page in pages], pages)),
        }
        seconds = take_turns(calls, rounds)
        runner.run(reader.close())
    local.close()
    for name, values in seconds.items():
        table.add_row(name, f"{num_bytes / median(values) / 1e9:.2f}", relate(seconds, name, "plain copy"))
    return table
