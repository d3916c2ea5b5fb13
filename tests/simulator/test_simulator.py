"""Random schedules of faults over the protocol's own state machines, and rules broken on purpose.

Replay a failing seed with `python -m tests.simulator --seed N --trace`.
"""

import os
import re
from collections.abc import Callable, Collection
from itertools import chain, islice
from pathlib import Path

import pytest

from bench.simulate.virtual_time import VirtualLoop
from tests.simulator.answer_mutations import ANSWER_MUTATIONS
from tests.simulator.answers import run_answers
from tests.simulator.models import run_models
from tests.simulator.mutations import MODEL_MUTATIONS, MUTATIONS
from tests.simulator.schedule import Outcome, run_schedule

NUM_SCHEDULES = int(os.environ.get("TEST_SCHEDULES", "60"))
TABLE = Path(__file__).with_name("README.md")
SEEDS = {name: int(seed) for name, seed in re.findall(r"^\| ([^|]+) \| (\d+) \|$", TABLE.read_text(), re.MULTILINE)}

ALL = {**MUTATIONS, **MODEL_MUTATIONS, **ANSWER_MUTATIONS}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("run", "rules", "count"),
    [
        (run_schedule, MUTATIONS, NUM_SCHEDULES),
        (run_models, MODEL_MUTATIONS, NUM_SCHEDULES // 5),
        (run_answers, ANSWER_MUTATIONS, NUM_SCHEDULES // 5),
    ],
)
def test_no_schedule_breaks_an_invariant(run: Callable[[int], Outcome], rules: Collection[str], count: int) -> None:
    rare = sorted({SEEDS[name] for name in rules if SEEDS[name] >= count})  # each shows what few schedules do
    outcomes = (run(seed) for seed in chain(rare, range(count)))
    broken = (f"seed {outcome.seed}: {outcome.error}" for outcome in outcomes if outcome.error)
    assert not list(islice(broken, 5))


def test_a_seed_gives_the_same_schedule_again() -> None:
    for run in (run_schedule, run_models, run_answers):
        assert repr(run(17)) == repr(run(17))  # exceptions compare by identity


def test_no_task_outlives_its_loop() -> None:
    """Not even one that is about to go on."""
    actions: list[Callable[[], None]] = []
    loop = VirtualLoop(lambda: 0.0, lambda _seconds, action: actions.append(action))
    woken = loop.create_future()

    async def wait() -> None:
        await woken

    task = loop.create_task(wait())
    actions.pop()()
    woken.set_result(None)
    loop.kill()
    assert task.cancelled()


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_broken_rule_is_noticed(name: str) -> None:
    """The seed is the one in README.md's table, or another where schedules have changed since."""
    run = run_models if name in MODEL_MUTATIONS else run_answers if name in ANSWER_MUTATIONS else run_schedule
    with ALL[name]():
        assert any(run(seed).error for seed in chain([SEEDS[name]], range(2500)))
