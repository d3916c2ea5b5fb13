"""Attacks a service of real processes with an ordinary key, and says what that cost the others, in one table.

A steady stream and a second key are beside each attack, and beside as many harmless requests of the same size. The
exit code is 1 if the stream waits longer than beside these, the second key is served late, memory stays taken, or
anything is a 500.
"""

import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cyclopts import App
from rich.console import Console
from rich.table import Table

from demo.paths import TARGET_DIR
from tests.attack.cases import MODEL, WAIT_S, Outcome, Target, attack, build_cases
from tests.support.live import Live, serve

KEYS = {"stream": "sk-stream", "second": "sk-second", "attacker": "sk-attacker"}
MOST_GAP_S = 0.15  # of the stream, beyond that beside harmless requests
MOST_WAIT = 2.0  # times its quiet time: the second key's requests, at the median
LEAST_WAIT_S = 0.15  # a shorter wait does no harm
MOST_MEMORY = 1.1  # times the gateway's before, at the end
QUIET_S, SETTLE_S, PERIOD_S = 5.0, 1.0, 0.2
FLAGS = ("--batch-dir-mib=256", "--patience-s=30", "--max-queue=1024")

Row = dict[str, Any]  # a figure of a case |-> its value

app = App(name="python -m tests.attack", help=__doc__)


@dataclass
class Seen:
    """The gaps and waits of the others while something ran."""

    gaps_s: list[float] = field(default_factory=list)  # between parts of the stream
    waits_s: list[float] = field(default_factory=list)  # of the second key's requests
    outcome: Outcome = field(default_factory=Outcome)
    peak_mib: float = 0.0
    num_long_steps: float = 0.0
    seconds: float = 0.0

    @property
    def gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)

    @property
    def wait_s(self) -> float:
        return statistics.median(self.waits_s) if self.waits_s else WAIT_S


@dataclass(frozen=True)
class Found:
    """The results of all cases."""

    quiet: Seen
    rows: Sequence[Row]
    problems: Sequence[str]
    log: str  # of the service


class Others:
    """A stream and a second key, on threads, from `start` to `stop`; `seen` is what they have at present."""

    def __init__(self, url: str) -> None:
        self.seen = Seen()
        self.errors: list[str] = []
        self._url, self._is_over = url, threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._stream, self._ask)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _body(self, num_tokens: int) -> dict[str, Any]:
        return {"model": MODEL, "prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}

    def _client(self, name: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        return httpx.Client(base_url=self._url, timeout=WAIT_S, headers=headers)

    def _stream(self) -> None:
        each = {"stream": True, "return_token_ids": True}  # also of tokens without text, which have no part otherwise
        with self._client("stream") as client:
            last = time.perf_counter()
            while not self._is_over.is_set():
                with client.stream("POST", "/v1/completions", json={**self._body(400), **each}) as answer:
                    if answer.status_code != 200:
                        self.errors.append(f"the stream: {answer.status_code} {answer.read()[:200]!r}")
                        time.sleep(PERIOD_S)
                        continue
                    for _ in answer.iter_raw():
                        now = time.perf_counter()
                        self.seen.gaps_s.append(now - last)
                        last = now
                        if self._is_over.is_set():
                            return

    def _ask(self) -> None:
        with self._client("second") as client:
            while not self._is_over.wait(PERIOD_S):
                began = time.perf_counter()
                answer = client.post("/v1/completions", json=self._body(1))
                self.seen.waits_s.append(time.perf_counter() - began)
                if answer.status_code != 200:
                    self.errors.append(f"the second key: {answer.status_code} {answer.text[:200]}")


def read_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def run(live: Live, others: Others, name: str, target: Target, *, is_control: bool) -> Seen:
    """Run one case; returns the others' gaps and waits from its beginning to a moment after its end."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=attack, args=(there, name, target, is_control))
    process.start()
    here.recv()
    steps = live.metric("gateway", "event_loop_long_steps_total")
    seen = others.seen = Seen()
    began = time.monotonic()
    here.send("go")
    while not here.poll(0.05):
        seen.peak_mib = max(seen.peak_mib, read_mib(live.pids["gateway"]))
        if not process.is_alive() and not here.poll(0.0):
            raise AssertionError(f"{name}: the attacker ended with {process.exitcode}")
    seen.outcome = here.recv()
    time.sleep(SETTLE_S)
    seen.seconds = time.monotonic() - began
    others.seen = Seen()
    seen.num_long_steps = live.metric("gateway", "event_loop_long_steps_total") - steps
    process.join(WAIT_S)
    return seen


def find_problems(name: str, seen: Seen, control: Seen, quiet: Seen) -> Iterator[str]:
    if seen.gap_s > control.gap_s + MOST_GAP_S:
        yield f"{name}: the stream waited {seen.gap_s:.2f} s, beside harmless requests {control.gap_s:.2f} s"
    if seen.wait_s > max(MOST_WAIT * max(quiet.wait_s, control.wait_s), LEAST_WAIT_S):
        yield f"{name}: the second key waited {seen.wait_s:.2f} s, {quiet.wait_s:.2f} s while it was quiet"
    if seen.outcome["500"] or seen.outcome["INTERNAL"] or seen.outcome["UNKNOWN"]:
        yield f"{name}: {dict(seen.outcome)}"


@contextmanager
def serving() -> Iterator[Live]:
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"--api-key={key}" for key in KEYS.values()]
        with serve(TARGET_DIR, *keys, *FLAGS, f"--batch-dir={folder}/batches", hands_over=False) as live:
            yield live


@app.default
def main(*names: str, out: Path = Path("build/attack.json")) -> int:
    """Run the cases and print what each cost the others.

    Parameters
    ----------
    names
        Parts of the names of cases; without any, all.
    out
        The figures, as JSON.
    """
    console, started = Console(width=200), time.monotonic()
    found = attack_service(names, lambda row: console.print(f"{time.monotonic() - started:3.0f} s: {row}"))
    console.print(_table(found), *found.problems, f"{time.monotonic() - started:3.0f} s", sep="\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found.rows, indent=1) + "\n")
    out.with_suffix(".log").write_text(found.log)
    return 1 if found.problems else 0


def attack_service(names: Sequence[str], on_row: Callable[[Row], object]) -> Found:
    """Runs the cases whose names have one of these parts, or all."""
    chosen = [case for case in build_cases() if not names or any(name in case for name in names)]
    problems, rows = list[str](), list[Row]()
    with serving() as live:
        target = Target(live.url, live.grpc_address, KEYS["attacker"])
        others = Others(live.url)
        time.sleep(QUIET_S)  # the first answers are slower
        quiet = others.seen = Seen()
        time.sleep(QUIET_S)
        for name in chosen:
            control = run(live, others, name, target, is_control=True)
            seen = run(live, others, name, target, is_control=False)
            problems += find_problems(name, seen, control, quiet)
            rows.append(_row(name, seen, control))
            on_row(rows[-1])
        if not names:
            problems += _find_kept_memory(live, rows)
        others.stop()
        problems += others.errors[:5]
        log = live.read_log()
    return Found(quiet, rows, [*problems, *_find_in_log(log)], log)


def _find_kept_memory(live: Live, rows: Sequence[Row]) -> list[str]:
    """The gateway's memory must not grow with each attack: compared with the first case, whose control took bodies."""
    time.sleep(QUIET_S)
    before, now = rows[0]["memory_mib"], read_mib(live.pids["gateway"])
    return [f"the gateway has {now:.0f} MiB, {before:.0f} after the first case"] if now > MOST_MEMORY * before else []


def _find_in_log(log: str) -> list[str]:
    """Tracebacks, and steps of the event loop that took as long as the stream may wait."""
    found = [line for line in log.splitlines() if "step of the event loop" in line and line.startswith("{")]
    problems = [line[:400] for line in found if json.loads(line)["cpu_s"] > MOST_GAP_S]
    if (num_tracebacks := log.count("Traceback (most recent call last)")) > 0:
        problems.append(f"{num_tracebacks} tracebacks in the log")
    return problems


def _row(name: str, seen: Seen, control: Seen) -> Row:
    return {
        "case": name,
        "answers": " ".join(f"{count}x {what}" for what, count in sorted(seen.outcome.items())),
        "gap_s": round(seen.gap_s, 3),
        "gap_beside_harmless_s": round(control.gap_s, 3),
        "second_s": round(seen.wait_s, 3),
        "second_beside_harmless_s": round(control.wait_s, 3),
        "memory_mib": round(max(seen.peak_mib, control.peak_mib)),
        "long_steps": int(seen.num_long_steps),
        "seconds": round(seen.seconds, 1),
    }


def _table(found: Found) -> Table:
    table = Table(title=f"quiet: longest gap {found.quiet.gap_s:.3f} s, second key {found.quiet.wait_s:.3f} s")
    for name in found.rows[0] if found.rows else ():
        table.add_column(name)
    for row in found.rows:
        table.add_row(*map(str, row.values()))
    return table


if __name__ == "__main__":
    sys.exit(app())
