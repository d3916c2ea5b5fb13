"""Attacks a service of real processes on this machine, and says in one table what became of it.

Exit code 1 if a token is wrong, a request hangs, a page stays used, or a refusal has another reason than it must have.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from cyclopts import App
from rich.console import Console

from bench.peers.figures import put_between
from demo.paths import TARGET_DIR
from runtime.settings import ConfigError
from tests.faults import chaos
from tests.prove import attacks, features, orders
from tests.prove.report import Report, build_markdown, build_tables
from tests.support.fault_answers import Truth
from tests.support.oracle import Oracle

PARTS = ("references", "orders", "features", "kills")
TITLE, COLUMN = "and also", "outcome"
NUM_STREAMS = 16

app = App(name="python -m tests.prove", help=__doc__)


def run_references(report: Report, truth: Truth, transports: Sequence[str]) -> None:
    for way in map(attacks.WAYS.__getitem__, transports):
        if way.missing:
            report.put(attacks.TITLE, attacks.ANY, way.transport, f"not tried: {way.missing}")
            continue
        attacks.prove_references(report, truth, way)


def run_orders(report: Report, truth: Truth) -> str:
    orders.prove_orders(report, truth)
    return f"{len(orders.ORDERS)} start orders of 4 processes, then each killed and started again: right"


def run_features(report: Report) -> str:
    found = features.build_features()
    features.prove_features(report, found)
    number = sum(map(len, found.values()))
    return f"{number} requests for {len(found)} features, and cancels, with hand-off and without: equal"


def run_kills(report: Report, minutes: float) -> str:
    found = chaos.run(minutes, NUM_STREAMS)
    chaos.report(found, minutes)
    outcomes = found.tally.outcomes
    report.num_answers += outcomes.total()
    report.num_wrong += outcomes["wrong"]
    report.require(found.is_right, f"kills: {dict(outcomes)}, {found.unused}; {found.tally.complaints[:3]}")
    return (
        f"{found.kills.total()} workers killed, one every {chaos.KILL_EVERY_S:g} s, under {NUM_STREAMS} streams: "
        f"{outcomes['right']} answers right"
    )


def run_part(report: Report, name: str, part: Callable[[Report], str | None], console: Console) -> None:
    """Whatever ends a part early is a finding."""
    started, known = time.monotonic(), len(report.problems)
    try:
        text = part(report)
    except Exception as error:
        text = name
        report.require(False, f"{name}: {error!r}")
    num_new = len(report.problems) - known
    if text is not None:
        what, _, outcome = text.partition(": ")
        report.put(TITLE, what, COLUMN, f"WRONG: {num_new} findings" if num_new else outcome)
    console.print(
        f"{name}: {time.monotonic() - started:.0f} s, {num_new} wrong", *report.problems[known:][:9], sep="\n  "
    )


@app.default
def main(
    *,
    parts: str = ",".join(PARTS),
    transports: str = ",".join(attacks.WAYS),
    minutes: float = 1.5,
    out: Path = Path("build/prove.md"),
    document: Path | None = None,
) -> int:
    """Run the parts and print what became of each attack.

    Parameters
    ----------
    parts
        Which, in this order.
    transports
        Over which references are attacked.
    minutes
        Of kills.
    out
        All tables, as Markdown.
    document
        Put the short table between this file's markers, such as README.md.
    """
    truth = Truth(Oracle(TARGET_DIR))
    known: dict[str, Callable[[Report], str | None]] = {
        "references": partial(run_references, truth=truth, transports=split(transports, attacks.WAYS)),
        "orders": partial(run_orders, truth=truth),
        "features": run_features,
        "kills": partial(run_kills, minutes=minutes),
    }
    report, console, started = Report(), Console(), time.monotonic()
    for name in split(parts, known):
        run_part(report, name, known[name], console)
    console.print(*build_tables(report), report.summary(), sep="\n")
    console.print(f"{time.monotonic() - started:.0f} s")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(build_markdown(report) + "\n")
    if document is not None:
        short = build_markdown(report, (attacks.TITLE, TITLE))
        document.write_text(put_between(document.read_text(), "prove", short))
    return 1 if report.problems else 0


def split(names: str, known: Iterable[str]) -> list[str]:
    if unknown := set(names.split(",")).difference(known):
        raise ConfigError(f"{', '.join(unknown)} is not known: {', '.join(known)}")
    return names.split(",")


if __name__ == "__main__":
    try:
        sys.exit(app())
    except ConfigError as error:
        sys.exit(f"error: {error}")
