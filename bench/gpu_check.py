"""Checks correctness and speed on a GPU: the most important checks first, and a table in docs/GPU.md at the end.

    python -m bench.gpu_check                        (make gpu-check)
    python -m bench.gpu_check --device cpu           the same on small shapes, to test the checks themselves
    python -m bench.gpu_check --parts engine ipc     only these
    MINUTES=10 python -m bench.gpu_check --parts churn --budget-s 900

Checks of a part share a process. A check that fails, hangs or loses the GPU's context costs no other: those after it
get a new process. Rows are written as they come. Knows parts and processes; the checks are in bench/gpu_checks/.
"""

import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import App, Parameter

from tests.support.interpreter import interpret_kernels

LAST_WORDS_S = 3
MISSED = "MissedError"  # of bench.gpu_checks.card: correct, but slower than its goal
SKIPPED = "skipped: "  # begins what a check returns that cannot run on this machine
DOCUMENT = Path(__file__).parents[1] / "docs" / "GPU.md"
BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"
Result = Literal["ok", "missed", "skipped", "FAILED", "not run"]

app = App(help=__doc__)


@dataclass(frozen=True, slots=True)
class Part:
    """Checks that share a process while they hold."""

    name: str
    limit_s: float  # of each check
    checks: tuple[str, ...]  # module:function of bench.gpu_checks


CHURN_S = 60 * float(os.environ.get("MINUTES") or 1)
PARTS = (
    Part("machine", 60, ("card:check_doctor", "card:describe_card")),
    Part("defaults", 90, ("service:check_defaults",)),
    Part("engine", 60, ("engine:check_greedy", "engine:check_logits", "engine:check_ahead", "engine:check_graphs")),
    Part("drains", 60, ("speed:time_drains",)),
    Part("ipc", 100, ("ipc:check_ipc_copy", "ipc:check_ipc_kill")),
    Part("host", 60, ("speed:time_host",)),
    Part("attention", 60, (
        "attention:time_fa3", "attention:check_attention", "attention:check_captured", "attention:check_captured_half",
    )),
    Part("latents", 60, ("latents:check_latents", "latents:time_latents")),
    Part("families", 60, ("families:check_families",)),
    Part("one stream", 60, ("speed:time_one_stream",)),
    Part("kernels", 60, ("layers:check_layers", "sampling:check_sampling", "fp8:check_rounding", "fp8:check_fp8")),
    Part("hand-off", 60, ("ipc:time_ipc", "ipc:time_grpc", "ipc:time_beside")),
    Part("memory", 60, ("memory:check_memory",)),
    Part("many streams", 60, (
        "speed:time_many_streams", "speed:time_most_streams", "speed:time_mixed", "speed:time_prefill",
        "speed:time_long_prompt",
    )),
    Part("service", 120, ("service:check_service",)),
    Part("two GPUs", 120, ("ranks:time_sums", "ipc:check_ipc_across", "service:check_ranks")),
    Part("deaths", 120, ("service:check_deaths",)),
    Part("churn", 60 + CHURN_S, ("engine:check_churn",)),
    Part("figures", 60, ("speed:time_speculation", "speed:time_fp8", "speed:time_start")),
    Part("coded weights", 60, ("coded:check_groups", "coded:check_blocks", "coded:check_experts")),
    Part("nixl", 120, ("ipc:check_nixl",)),
    Part("kernel times", 60, (
        "attention:time_layouts", "sampling:time_sampling", "fp8:time_linear", "coded:time_coded",
    )),
)  # fmt: skip
"""In the order of what a first run on a GPU should tell."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table."""

    part: str
    check: str  # its docstring's first line
    result: Result
    detail: str
    seconds: float


def run_part(part: Part, device: torch.device, first: int = 0) -> Iterator[Outcome]:
    """Run the checks of a part from number `first` on in this process."""
    for path in part.checks[first:]:
        module, _, function = path.partition(":")
        faulthandler.dump_traceback_later(max(part.limit_s - LAST_WORDS_S, 1))  # shows where it hangs
        started = time.monotonic()
        result: Result = "ok"
        title = function
        try:
            check = getattr(importlib.import_module(f"bench.gpu_checks.{module}"), function)
            title = (check.__doc__ or function).splitlines()[0].removesuffix(".")
            detail = check(device)
            if detail.startswith(SKIPPED):
                result, detail = "skipped", detail.removeprefix(SKIPPED)
        except Exception as error:  # a failed check is a row, and the others still run
            name = type(error).__name__
            if name != MISSED:
                traceback.print_exc()
            result = "missed" if name == MISSED else "FAILED"
            detail = str(error) if name == MISSED else f"{name}: {error}"
        finally:
            faulthandler.cancel_dump_traceback_later()
        yield Outcome(part.name, title, result, " ".join(detail.split()), time.monotonic() - started)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def run_apart(part: Part, device: str, deadline: float) -> Iterator[Outcome]:
    """Run a part in its own process, and what follows a failed, hanging or deadly check in a new one.

    `deadline`: time.monotonic() after which no check begins or goes on.
    """
    done = 0
    while done < len(part.checks):
        if time.monotonic() >= deadline:
            yield from (Outcome(part.name, check, "not run", "the time was over", 0) for check in part.checks[done:])
            return
        started, num_before = time.monotonic(), done
        command = build_command(part, device, done)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            assert process.stdout is not None
            timer = _kill_later(process, min(part.limit_s, deadline - started))
            result: Result = "ok"
            while result != "FAILED" and done < len(part.checks) and (line := process.stdout.readline()):
                if line.startswith('{"part"'):
                    outcome = Outcome(**json.loads(line))
                    yield outcome
                    timer.cancel()
                    done, started, result = done + 1, time.monotonic(), outcome.result
                    timer = _kill_later(process, min(part.limit_s, deadline - started))
            if result == "FAILED" or done == len(part.checks):
                _kill(process)  # with all that it started; what a failed check leaves may spoil the next
            status = process.wait()
            timer.cancel()
        if result != "FAILED" and done < len(part.checks):
            is_late = time.monotonic() >= started + min(part.limit_s, deadline - started)
            trouble = f"killed after {time.monotonic() - started:.0f} s" if is_late else f"ended with {status}"
            detail = f"after {done - num_before} checks: {trouble}"
            yield Outcome(part.name, part.checks[done], "FAILED", detail, time.monotonic() - started)
            done += 1


def build_command(part: Part, device: str, first: int) -> list[str]:
    """The process that runs a part's checks from number `first` on, and prints its rows."""
    command = [sys.executable, "-X", "faulthandler", "-m", "bench.gpu_check", "--inside", part.name]
    return [*command, "--device", device, "--first", str(first)]


def _kill_later(process: "subprocess.Popen[str]", seconds: float) -> threading.Timer:
    timer = threading.Timer(max(seconds, 0), _kill, [process])
    timer.daemon = True
    timer.start()
    return timer


def _kill(process: "subprocess.Popen[str]") -> None:
    """The process and all its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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
        detail = row.detail.replace("|", "/")[:500]
        lines.append(f"| {row.part} | {row.check} | {row.result} | {detail} | {row.seconds:.1f} |")
    return "\n".join(lines)


def replace_table(text: str, table: str) -> str:
    """The document with the table between its markers. ValueError if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} with {END} after it: put both where the table belongs")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


@app.default
def main(
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    parts: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    budget_s: float = 520,
    out: Path | None = None,
    document: Path | None = None,
    inside: str = "",
    first: int = 0,
) -> int:
    """Run the checks. Exit code 1 when one fails or is not run, 2 without a GPU; a missed goal is not a failure.

    Parameters
    ----------
    parts: names of parts; default: all.
    budget_s: no check begins after so many seconds, and none lasts longer.
    out: file to which rows are appended as JSON lines.
    document: Markdown file whose table is replaced; default: docs/GPU.md if all parts ran on a GPU.
    inside: of the process of one part, which prints its rows.
    first: of that process: the number of its first check.
    """
    named = {part.name: part for part in PARTS}
    if inside:
        if device == "cpu":
            interpret_kernels()
        for outcome in run_part(named[inside], torch.device(device), first):
            print(json.dumps(asdict(outcome)), flush=True)
        return 0
    if unknown := sorted(set(parts) - named.keys()):
        print(f"--parts: there is no {unknown[0]!r}; there are {', '.join(named)}")
        return 2
    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was checked. `--device cpu` tries the checks themselves.")
        return 2
    if document is None and device == "cuda" and not parts:
        document = DOCUMENT
    deadline = time.monotonic() + budget_s
    outcomes: list[Outcome] = []
    for part in [named[name] for name in parts] or PARTS:
        for outcome in run_apart(part, device, deadline):
            outcomes.append(outcome)
            print(
                f"{outcome.result:7} {outcome.part}: {outcome.check} [{outcome.seconds:.1f} s] {outcome.detail}",
                flush=True,
            )
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    table = build_table(describe_machine(device), outcomes)
    print(table)
    if document is not None:
        document.write_text(replace_table(document.read_text(), table))
    return 1 if any(outcome.result in ("FAILED", "not run") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(app())
