"""Figures as a picture: TPOT and TTFT against throughput, a curve per file; one run's requests over time; a roofline.

The only file that uses matplotlib, an extra: `pip install 'baton[bench]'`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.load.report import name_load

DPI = 130
MOST_REQUESTS = 200  # shown over time
TTFT_COLOUR, DECODE_COLOUR = "#d98324", "#2c6e9b"

mpl.use("agg")  # no screen
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "baton"}  # text stays text; a figure's file is the same twice


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One picture. The requests over time are those of the first file's last run."""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    tpot, ttft, requests = figure.subplots(1, 3)
    for result in results:
        draw_curve(tpot, result, "tpot")
        draw_curve(ttft, result, "ttft")
    for axes, name in ((tpot, "TPOT"), (ttft, "TTFT")):
        axes.set(
            title=f"{name} against throughput", xlabel="output tokens per second", ylabel=f"{name}, ms: p50 to p99"
        )
        axes.set_xlim(left=0)  # after the curves have set the range
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    draw_requests(requests, results[0])
    figure.savefig(path, dpi=DPI)


def draw_interference(groups: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Bars per server: gaps in its streams, quiet and the longest while long prompts come, and these prompts' TTFT.

    groups: title |-> quiet median ITL, longest ITL meanwhile, mean TTFT, each as server |-> milliseconds.
    """
    names = [(title, server) for title, figures in groups.items() for server in figures[0]]
    quiet, busy, ttft = ([groups[title][index][server] for title, server in names] for index in range(3))
    places = [at + 0.8 * list(groups).index(title) for at, (title, _) in enumerate(names)]
    figure = Figure(figsize=(11, 0.5 * len(names) + 1.3), layout="constrained")
    gaps, waits = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    longest = gaps.barh(
        places, busy, height=0.7, color=TTFT_COLOUR, label="longest gap while two prompts of 1,500 tokens come"
    )
    gaps.barh(places, quiet, height=0.7, color=DECODE_COLOUR, label="median gap before")
    gaps.bar_label(longest, [f"{value:,.0f} ms" for value in busy], padding=3)
    gaps.set(xscale="log", xlim=(10, 6 * max(busy)), title="4 streams: gaps between tokens, ms")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    bars = waits.barh(places, [value / 1e3 for value in ttft], height=0.7, color="#999999")
    waits.bar_label(bars, [f"{value / 1e3:.1f} s" for value in ttft], padding=3)
    waits.set(xlim=(0, 1.25e-3 * max(ttft)), title="the two prompts: mean TTFT, s")
    gaps.set_yticks(places, [server for _, server in names])
    for title in groups:
        first = places[next(at for at, (other, _) in enumerate(names) if other == title)]
        gaps.text(11, first - 0.62, title, fontsize=9, style="italic")
    gaps.set_ylim(places[-1] + 0.6, -0.95)  # downwards
    figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_roofline(
    bytes_a_second: float,
    ceilings: Mapping[str, float],
    kernels: Mapping[str, Sequence[tuple[str, float, float]]],
    path: Path,
) -> None:
    """Operations a second against operations for each byte that memory gives: kernels below what the machine allows.

    ceilings: name |-> operations a second. kernels: name |-> [(label, bytes a second, operations a second)].
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    intensities = [operations / num_bytes for points in kernels.values() for _, num_bytes, operations in points]
    ridges = [rate / bytes_a_second for rate in ceilings.values()]
    left, right = min(intensities) / 1.5, max(*intensities, *ridges) * 1.5
    for (name, rate), ridge in zip(ceilings.items(), ridges, strict=True):
        axes.plot([left, ridge, right], [left * bytes_a_second, rate, rate], color="#999999", linewidth=1)
        axes.annotate(name, (right, rate), textcoords="offset points", xytext=(-4, 4), ha="right", fontsize=8)
    for name, points in kernels.items():
        places = [operations / num_bytes for _, num_bytes, operations in points]
        axes.plot(places, [operations for _, _, operations in points], "o-", linewidth=0.8, markersize=4, label=name)
        for (label, _, operations), place in zip(points, places, strict=True):
            axes.annotate(label, (place, operations), textcoords="offset points", xytext=(5, -9), fontsize=7)
    axes.set(
        xscale="log", yscale="log", xlim=(left, right), xlabel="operations for each byte read",
        ylabel="operations a second", title=f"memory gives {bytes_a_second / 1e9:.1f} GB/s",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=DPI)


def draw_curve(axes: Axes, result: Mapping[str, Any], name: str) -> None:
    """One point per run: its median, with a whisker up to the 99th percentile."""
    runs = [run for run in result["levels"] if run["completed"]]
    rates = [run["output_throughput"] for run in runs]
    medians = [run[f"median_{name}_ms"] for run in runs]
    above = [max(0.0, run[f"p99_{name}_ms"] - median) for run, median in zip(runs, medians, strict=True)]
    axes.errorbar(rates, medians, [[0.0] * len(runs), above], marker="o", capsize=3, label=result["label"])
    for run, rate, median in zip(runs, rates, medians, strict=True):
        axes.annotate(name_load(run), (rate, median), textcoords="offset points", xytext=(6, -11), fontsize=8)


def draw_requests(axes: Axes, result: Mapping[str, Any]) -> None:
    """One bar per request, in send order: until its first token, and from there to its last."""
    run = result["levels"][-1]
    rows = sorted(zip(run["start_times"], run["ttfts"], run["latencies"], strict=True))[:MOST_REQUESTS]
    starts, ttfts = [row[0] for row in rows], [row[1] for row in rows]
    places = range(len(rows))
    axes.barh(places, ttfts, left=starts, height=0.8, color=TTFT_COLOUR, label="to the first token")
    firsts = [start + ttft for start, ttft in zip(starts, ttfts, strict=True)]
    rests = [max(0.0, row[2] - row[1]) for row in rows]
    axes.barh(places, rests, left=firsts, height=0.8, color=DECODE_COLOUR, label="to the last")
    axes.invert_yaxis()
    axes.set_title(f"Requests of {result['label']}, {name_load(run)}")
    axes.set_xlabel("seconds")
    axes.set_ylabel("request")
    axes.legend(fontsize=8)
