"""How many workers the gateway advises: a table, and that the advice settles."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.router.worker_view import WorkerView
from gateway.scaling.autoscaling import Goals, advise, describe_revisions
from tests.support.worker_views import DECODE, DECODE_2, PREFILL, PREFILL_2

GOALS = Goals(prefill_wait_s=1.0, kv_usage=0.8)
FAST = replace(PREFILL, tokens_per_s=1000.0)
FAST_2 = replace(PREFILL_2, tokens_per_s=1000.0)
IDLE = replace(DECODE, num_pages=10_000, free_pages=10_000)
IDLE_2 = replace(DECODE_2, num_pages=10_000, free_pages=10_000)
NOTHING = (0, 0)
DEAD: dict[str, Any] = {"is_alive": False}
FULL: dict[str, Any] = {"num_mine": 2, "num_others": 2}


@pytest.mark.parametrize(
    ("case", "workers", "queued", "expected"),
    [
        ("nothing to do", [FAST, IDLE], NOTHING, (1, 1)),
        ("nothing to do for two each", [FAST, FAST_2, IDLE, IDLE_2], NOTHING, (1, 1)),
        ("two seconds wait at a worker", [replace(FAST, tokens_waiting=2000), IDLE], NOTHING, (2, 1)),
        ("or here", [FAST, IDLE], (1, 1500), (2, 1)),
        ("twice as many is the most at once", [FAST, IDLE], (99, 99_000), (2, 1)),
        ("within the goal, but too much for one", [replace(FAST, tokens_waiting=900), FAST_2, IDLE], NOTHING, (2, 1)),
        ("nine tenths of the pages are in use", [FAST, replace(DECODE, free_pages=10)], NOTHING, (1, 2)),
        ("all places are in use", [FAST, replace(IDLE, **FULL)], NOTHING, (1, 2)),
        ("and more wait: prefill gets no more", [FAST, replace(IDLE, **FULL)], (16, 9000), (1, 2)),
        ("a worker that refuses is full", [FAST, replace(IDLE, is_full=True)], (16, 9000), (1, 2)),
        ("prefill is full, decode is not", [FAST, FAST_2, replace(IDLE, num_mine=1), IDLE_2], (640, 9000), (4, 1)),
        ("a dead worker does no work", [FAST, IDLE, replace(IDLE_2, **DEAD)], NOTHING, (1, 1)),
        ("all are dead: as many as there were", [replace(FAST, **DEAD), *[replace(IDLE, **DEAD)] * 8], (9, 9), (1, 8)),
        ("all prefill is dead", [*[replace(FAST, **DEAD)] * 3, IDLE], (99, 9999), (3, 1)),
        ("new workers whose speed is not known", [replace(PREFILL, tokens_waiting=9000)] * 6 + [IDLE], NOTHING, (6, 1)),
        ("prefill has not been found yet", [IDLE], (1, 10), (1, 1)),
    ],
)
def test_advice(case: str, workers: Sequence[WorkerView], queued: tuple[int, int], expected: tuple[int, int]) -> None:
    assert tuple(advise(workers, *queued, GOALS, expects_prefill=True).values()) == expected, case
    without = advise([view for view in workers if view.role == "decode"], *queued, GOALS, expects_prefill=False)
    assert without == {"prefill": 0, "decode": expected[1]}, case


def test_a_rollout_is_seen_in_metrics() -> None:
    views = [
        replace(PREFILL, revision="old"), replace(DECODE, revision="old", num_mine=3, **DEAD),
        replace(DECODE_2, revision="new", num_mine=2, num_others=9),
    ]  # fmt: skip
    samples = [one for metric in describe_revisions(views) for one in metric.samples]
    values = {(one.name, *one.labels.values()): one.value for one in samples}
    workers, running = "baton:revision_workers", "baton:revision_requests_running"
    assert values == {
        (workers, "old", "prefill"): 1, (workers, "old", "decode"): 0, (running, "old"): 3,
        (workers, "new", "prefill"): 0, (workers, "new", "decode"): 1, (running, "new"): 2,
    }  # fmt: skip
