"""Random schedules of faults over the protocol's own state machines, and rules broken on purpose.

Replay a failing seed with `python -m tests.simulator --seed N --trace`.
"""

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.simulator.models import run_models
from tests.simulator.mutations import MODEL_MUTATIONS, MUTATIONS
from tests.simulator.schedule import run_schedule

NUM_SCHEDULES = int(os.environ.get("TEST_SCHEDULES", "1000"))
NUM_MODEL_SCHEDULES = NUM_SCHEDULES // 5
NUM_PROCESSES = 2
TABLE = Path(__file__).with_name("README.md")
SEEDS = {name: int(seed) for name, seed in re.findall(r"^\| ([^|]+) \| (\d+) \|$", TABLE.read_text(), re.MULTILINE)}


@pytest.mark.timeout(1800)
def test_no_schedule_breaks_an_invariant() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulator", "--seeds", f"{first}:{first + share}", *kind],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for count, kind in ((NUM_SCHEDULES, ()), (NUM_MODEL_SCHEDULES, ("--models",)))
        for first, share in ((part * (count // NUM_PROCESSES), count // NUM_PROCESSES) for part in range(NUM_PROCESSES))
    ]  # fmt: skip
    outputs = [run.communicate()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs), "\n".join(outputs)


def test_a_seed_gives_the_same_schedule_again() -> None:
    for run in (run_schedule, run_models):
        assert repr(run(17)) == repr(run(17))  # exceptions compare by identity


@pytest.mark.parametrize("name", sorted({**MUTATIONS, **MODEL_MUTATIONS}))
def test_a_broken_rule_is_noticed(name: str) -> None:
    """The seed is the one in README.md's table, or another where schedules have changed since."""
    run = run_models if name in MODEL_MUTATIONS else run_schedule
    with {**MUTATIONS, **MODEL_MUTATIONS}[name]():
        assert any(run(seed).error for seed in chain([SEEDS[name]], range(2500)))
