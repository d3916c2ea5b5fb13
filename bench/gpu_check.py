"""Checks correctness and speed on a GPU: a list of checks in one call, with a table at the end.

    python -m bench.gpu_check                        (make gpu-check)
    python -m bench.gpu_check --device cpu           the same on small shapes, to test the checks themselves
    python -m bench.gpu_check --parts engine ipc     only these

Each part runs in its own process with a time limit, so that a hang or a lost GPU context affects no other part. Rows
are written as they come. Knows parts and processes; the checks are in bench/gpu_checks/.
"""

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from cyclopts import App

LAST_WORDS_S = 3
MISSED = "MissedError"  # of bench.gpu_checks.speed: correct, but slower than its goal

app = App(help=__doc__)


@dataclass(frozen=True, slots=True)
class Part:
    """Checks that share a process."""

    name: str
    limit_s: float
    checks: tuple[str, ...]  # module:function of bench.gpu_checks


PARTS = (
    Part("machine", 60, ("machine:check_doctor",)),
    Part("attention", 90, ("attention:check_attention", "attention:time_plan")),
    Part("kernels", 90, ("layers:check_layers", "sampling:check_sampling", "fp8:check_fp8")),
    Part("coded weights", 90, ("coded:check_groups", "coded:check_blocks")),
    Part(
        "engine", 90, ("engine:check_greedy", "engine:check_logits", "engine:check_graphs", "engine:check_eager_ahead")
    ),
    Part("service", 150, ("service:check_service",)),
    Part("ipc", 150, ("ipc:check_ipc_copy", "ipc:time_ipc", "ipc:check_ipc_kill")),
    Part("nixl", 120, ("nixl:check_nixl",)),
    Part("deaths", 120, ("service:check_deaths",)),
    Part("one stream", 60, ("speed:time_one_stream",)),
    Part("host", 60, ("speed:time_host",)),
    Part("many streams", 60, ("speed:time_many_streams",)),
    Part("prefill", 60, ("speed:time_prefill",)),
    Part("speculation", 60, ("speed:time_speculation",)),
    Part("fp8", 60, ("speed:time_fp8",)),
    Part("start", 60, ("speed:time_start",)),
    Part("kernel times", 90, ("attention:time_layouts", "sampling:time_sampling", "fp8:time_linear")),
    Part("coded weights' times", 90, ("coded:time_coded",)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table."""

    part: str
    check: str  # its docstring's first line
    result: Literal["ok", "missed", "FAILED"]
    detail: str
    seconds: float


def run_part(part: Part, device: torch.device) -> Iterator[Outcome]:
    """Run a part in this process."""
    for path in part.checks:
        module, _, function = path.partition(":")
        started = time.monotonic()
        result: Literal["ok", "missed", "FAILED"] = "ok"
        title = function
        try:
            check = getattr(importlib.import_module(f"bench.gpu_checks.{module}"), function)
            title = (check.__doc__ or function).splitlines()[0].removesuffix(".")
            detail = check(device)
        except Exception as error:  # a failed check is a row, and the others still run
            name = type(error).__name__
            if name != MISSED:
                traceback.print_exc()
            result = "missed" if name == MISSED else "FAILED"
            detail = str(error) if name == MISSED else f"{name}: {error}"
        yield Outcome(part.name, title, result, " ".join(detail.split()), time.monotonic() - started)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_apart(part: Part, device: str, limit_s: float) -> Iterator[Outcome]:
    """Run a part in its own process, which is killed with all its children at the time limit."""
    command = [sys.executable, "-X", "faulthandler", "-m", "bench.gpu_check", "--inside", part.name]
    command += ["--device", device, "--budget-s", str(limit_s)]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        shown, _ = process.communicate(timeout=limit_s)
        trouble = f"ended with {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        shown, _ = process.communicate()
        trouble = f"killed after {limit_s:.0f} s"
    outcomes = [Outcome(**json.loads(line)) for line in shown.splitlines() if line.startswith('{"part"')]
    yield from outcomes
    if len(outcomes) < len(part.checks):
        missing = ", ".join(part.checks[len(outcomes) :])
        detail = f"not done: {missing} ({trouble or 'it said nothing'})"
        yield Outcome(part.name, "the part's process", "FAILED", detail, time.monotonic() - started)


def describe_machine(device: str) -> str:
    """One line above the table: date, GPU, driver, versions."""
    facts = [time.strftime("%Y-%m-%d"), torch.cuda.get_device_name() if device == "cuda" else "CPU"]
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts.append("driver " + subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())
    facts.append(f"torch {torch.__version__}")
    for name in ("triton", "flashinfer", "transformers"):
        try:
            facts.append(f"{name} {importlib.import_module(name).__version__}")
        except ImportError as error:
            facts.append(f"no {name} ({error})")
    return ", ".join(facts)


def build_table(machine: str, outcomes: Sequence[Outcome]) -> str:
    """Markdown for docs/GPU.md."""
    lines = [machine, "", "| part | check | result | detail | s |", "|---|---|---|---|---|"]
    for row in outcomes:
        detail = row.detail.replace("|", "/")[:300]
        lines.append(f"| {row.part} | {row.check} | {row.result} | {detail} | {row.seconds:.1f} |")
    return "\n".join(lines)


@app.default
def main(
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    parts: tuple[str, ...] = (),
    budget_s: float = 520,
    out: Path | None = None,
    inside: str = "",
) -> int:
    """Run the checks. Exit code 1 when one fails, 2 without a GPU; a missed goal is no failure.

    Parameters
    ----------
    parts: names of parts; default: all.
    budget_s: no part begins after so many seconds, and none lasts longer.
    out: file to which rows are appended as JSON lines.
    inside: of the process of one part, which prints its rows.
    """
    named = {part.name: part for part in PARTS}
    if inside:
        faulthandler.dump_traceback_later(max(budget_s - LAST_WORDS_S, 1))  # shows where it hangs before it is killed
        for outcome in run_part(named[inside], torch.device(device)):
            print(json.dumps(asdict(outcome)), flush=True)
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was checked. `--device cpu` tries the checks themselves.")
        return 2
    deadline = time.monotonic() + budget_s
    outcomes: list[Outcome] = []
    for part in [named[name] for name in parts] or PARTS:
        left_s = deadline - time.monotonic()
        rows = (
            run_apart(part, device, min(part.limit_s, left_s))
            if left_s > 0
            else [Outcome(part.name, "all", "FAILED", "not begun: the time was over", 0.0)]
        )
        for outcome in rows:
            outcomes.append(outcome)
            print(
                f"{outcome.result:6} {outcome.part}: {outcome.check} [{outcome.seconds:.1f} s] {outcome.detail}",
                flush=True,
            )
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    print(build_table(describe_machine(device), outcomes))
    return 1 if any(outcome.result == "FAILED" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(app())
