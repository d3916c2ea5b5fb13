"""The core of engine, worker and gateway stays small enough to be read: its size, and what one decode step reads."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.hardware import CHECK_STEPS

ROOT = Path(__file__).parents[2]
MAX_LINES = {"engine": 5200, "worker": 1800}
MAX_ROUTER_LINES = 3500  # the gateway's core
MAX_FILES = 60  # of both, without empty ones
STEP_FILES, STEP_LINES, STEP_TYPES, FILE_LINES = 20, 3000, 20, 300


def list_core() -> Iterator[Path]:
    """The files that import no satellite, by the contracts that say so."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for name in ("The engine's core imports no satellite", "The worker's core"):
        (modules,) = (one["source_modules"] for one in contracts if one["name"].startswith(name))
        for module in modules:
            path = ROOT / module.replace(".", "/")
            yield from path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]


def test_the_core_is_small() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in list_core()}
    sums = {
        top: sum(count for path, count in lines.items() if path.relative_to(ROOT).parts[0] == top) for top in MAX_LINES
    }
    assert all(sums[top] <= most for top, most in MAX_LINES.items()), sums
    assert len([count for count in lines.values() if count]) <= MAX_FILES
    router = sum(len(path.read_text().splitlines()) for path in (ROOT / "gateway" / "router").glob("*.py"))
    assert router <= MAX_ROUTER_LINES, router


@pytest.mark.timeout(120)
def test_a_decode_step_reads_few_files() -> None:
    """In a process of its own: the trace sees whatever runs for the first time."""
    unchecked = {name: value for name, value in os.environ.items() if name != CHECK_STEPS}
    command = [sys.executable, "-m", "tests.support.step_reading", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=unchecked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    files, types = json.loads(done.stdout.splitlines()[-1])
    assert len(files) <= STEP_FILES and sum(files.values()) <= STEP_LINES, files
    assert max(files.values()) <= FILE_LINES and len(types) <= STEP_TYPES, (files, types)
