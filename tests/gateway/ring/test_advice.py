"""How many workers the gateway advises: a table, and that the advice settles."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ring.advice import Backlog, Goals, advise
from gateway.ring.policy import WorkerView
from tests.support.worker_views import DECODE, DECODE_2, PREFILL, PREFILL_2

GOALS = Goals(prefill_wait_s=1.0, kv_usage=0.8)
FAST = replace(PREFILL, tokens_per_s=1000.0)
FAST_2 = replace(PREFILL_2, tokens_per_s=1000.0)
IDLE = replace(DECODE, num_pages=10_000, free_pages=10_000)
IDLE_2 = replace(DECODE_2, num_pages=10_000, free_pages=10_000)
NOTHING = Backlog()


@pytest.mark.parametrize(
    ("case", "workers", "backlog", "expected"),
    [
        ("nothing to do", [FAST, IDLE], NOTHING, (1, 1)),
        ("nothing to do for two each", [FAST, FAST_2, IDLE, IDLE_2], NOTHING, (1, 1)),
        ("two seconds wait at a worker", [replace(FAST, tokens_waiting=2000), IDLE], NOTHING, (2, 1)),
        ("or here", [FAST, IDLE], Backlog(1, 1500), (2, 1)),
        ("the speed is not known yet", [replace(PREFILL, tokens_waiting=9000), IDLE], NOTHING, (1, 1)),
        (
            "within the goal, yet too much for one less",
            [replace(FAST, tokens_waiting=900), FAST_2, IDLE],
            NOTHING,
            (2, 1),
        ),
        ("nine tenths of the pages are in use", [FAST, replace(DECODE, free_pages=10)], NOTHING, (1, 2)),
        ("all places are in use", [FAST, replace(IDLE, num_mine=2, num_others=2)], NOTHING, (1, 2)),
        ("four times the places wait", [FAST, replace(IDLE, num_mine=4)], Backlog(16, 16), (1, 7)),
        ("decode lacks workers: prefill gets no more", [FAST, replace(DECODE, free_pages=0)], Backlog(4, 9000), (1, 9)),
        ("a dead decode worker is missing", [FAST, IDLE, replace(IDLE_2, is_alive=False)], NOTHING, (1, 1)),
        ("all are dead", [replace(FAST, is_alive=False), replace(IDLE, is_alive=False)], Backlog(9, 9), (1, 1)),
        ("no prefill worker is wanted at all", [IDLE], Backlog(1, 10), (0, 1)),
    ],
)
def test_advice(case: str, workers: Sequence[WorkerView], backlog: Backlog, expected: tuple[int, int]) -> None:
    assert tuple(advise(workers, backlog, GOALS).values()) == expected, case


@given(waiting=st.integers(0, 50_000), count=st.integers(1, 20), used=st.integers(0, 100))
def test_advice_that_is_followed_settles_within_the_goals(waiting: int, count: int, used: int) -> None:
    """The same work on as many workers as advised asks for no change."""
    for _ in range(3):
        prefills = [replace(FAST, tokens_waiting=waiting // count)] * count
        decodes = [replace(DECODE, free_pages=100 - used)]
        count = advise([*prefills, *decodes], NOTHING, GOALS)["prefill"] if used < 80 else count
    if used < 80:
        again = advise([replace(FAST, tokens_waiting=waiting // count)] * count + decodes, NOTHING, GOALS)["prefill"]
        assert again == count and (count == 1 or waiting // count <= 1000)
