"""Attacks services of real processes on this machine, and says in one table what became of it.

Exit code 1 if a token is wrong, a request hangs, a page stays used, or a refusal has another reason than it must have.
"""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from cyclopts import App
from rich.console import Console

from demo.paths import TARGET_DIR
from tests.attack.__main__ import attack_service
from tests.faults import chaos
from tests.prove import attacks, features, orders, rollout, stored
from tests.prove.report import Report, build_markdown, build_tables
from tests.support.fault_answers import Truth
from tests.support.oracle import Oracle
from tests.support.postgres import find_binaries

Part = Literal["references", "orders", "features", "kills", "rollout", "stored", "attack"]
Transport = Literal["shm", "grpc", "nixl", "cuda_ipc"]
TITLE, COLUMN, ATTACK = "and also", "outcome", "one key's attack, and what it cost the others"
NUM_STREAMS = 16

app = App(name="python -m tests.prove", help=__doc__)


def prove_references(report: Report, truth: Truth, transports: Sequence[Transport]) -> None:
    for way in (attacks.WAYS[name] for name in transports):
        if not way.missing:
            attacks.prove_references(report, truth, way)
        for case in attacks.CASES if way.missing else ():
            report.put(attacks.TITLE, case, way.name, way.missing)


def prove_kills(report: Report, minutes: float) -> str:
    """Returns what was done."""
    found = chaos.run(minutes, NUM_STREAMS)
    outcomes = found.tally.outcomes
    report.num_answers += outcomes.total()
    report.num_wrong += outcomes["wrong"]
    report.require(found.is_right, f"kills: {dict(outcomes)}, {found.unused}; {found.tally.complaints[:3]}")
    kills = f"{found.kills.total()} workers killed, one every {chaos.KILL_EVERY_S:g} s"
    return f"{kills}, under {NUM_STREAMS} streams with {outcomes.total()} answers"


def prove_attack(report: Report) -> str:
    """Returns what was done."""

    def put(row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "case":
                report.put(ATTACK, row["case"], name.replace("_", " "), str(value))

    found = attack_service((), put)
    for problem in found.problems:
        report.require(False, f"attack: {problem}")
    return f"{len(found.rows)} attacks of a client with an ordinary key beside a stream and another key"


def prove_part(report: Report, truth: Truth, part: Part, transports: Sequence[Transport], minutes: float) -> None:
    """Whatever ends it early is a finding."""
    known, done = len(report.problems), ""
    try:
        if part == "references":
            prove_references(report, truth, transports)
        elif part == "orders":
            orders.prove_orders(report, truth)
            done = f"{len(orders.ORDERS)} start orders of 4 processes, then each of them killed and started again"
        elif part == "features":
            found = features.build_features()
            features.prove_features(report, found)
            number = sum(map(len, found.values()))
            done = f"{number} requests for {len(found)} features, and cancels, with hand-off and without"
        elif part == "kills":
            done = prove_kills(report, minutes)
        elif part == "rollout":
            done = rollout.prove_rollout(report, minutes)
        elif part == "stored" and find_binaries() is None:
            report.put(TITLE, "stored answers of two gateways", COLUMN, "no PostgreSQL")
        elif part == "stored":
            done = stored.prove_stored(report, minutes)
        else:
            done = prove_attack(report)
    except Exception as error:
        report.require(False, f"{part}: {error!r}")
    if wrong := len(report.problems) - known:
        report.put(TITLE, done or part, COLUMN, f"{wrong} WRONG")
    elif done:
        report.put(TITLE, done, COLUMN, "within the limits" if part == "attack" else "every answer right")


@app.default
def main(
    *parts: Part,
    transports: tuple[Transport, ...] = get_args(Transport),
    minutes: float = 1.5,
    out: Path = Path("build/prove.md"),
    document: Path | None = None,
) -> int:
    """Run the parts and print what became of each attack.

    Parameters
    ----------
    parts
        Which; without any, all.
    transports
        Over which references are attacked.
    minutes
        Of kills.
    out
        All tables, as Markdown.
    document
        Put the short ones between this file's markers, such as docs/RELIABILITY.md.
    """
    truth, report, console, started = Truth(Oracle(TARGET_DIR)), Report(), Console(), time.monotonic()
    for part in parts or get_args(Part):
        console.print(f"{time.monotonic() - started:3.0f} s: {part}")
        prove_part(report, truth, part, transports, minutes)
    console.print(*report.problems, *build_tables(report), report.summary(), sep="\n")
    console.print(f"{time.monotonic() - started:3.0f} s")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(build_markdown(report) + "\n")
    if document is not None:
        short = build_markdown(report, (attacks.TITLE, TITLE))
        between = re.compile(r"(?<=<!-- prove -->\n).*?(?=<!-- /prove -->)", re.DOTALL)
        document.write_text(between.sub(lambda _: f"{short}\n", document.read_text()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(app())
