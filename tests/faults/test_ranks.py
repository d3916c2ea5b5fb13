"""Ranks that die or stop: their worker counts as one incarnation and leaves no process. Rows 3, 4, 10, 12 and 13."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.load import Load
from tests.support.fault_answers import Truth, ask, find_busy, is_alive, mend
from tests.support.fleet import ProcessFleet, run_fleet
from tests.support.live import WAIT_S, wait_until

STALL_S = 5.0  # per step, before the gateway drops a worker: longer than a step takes on a loaded machine


@pytest.fixture(scope="module")
def fleet() -> Iterator[ProcessFleet]:
    """One worker per role, two ranks each."""
    stall = [f"--stall-s={STALL_S:g}"]
    with run_fleet(2, 2, {"gateway": stall, "prefill": [*stall, "--tp=2"], "decode": ["--tp=2"]}) as running:
        yield running


def is_there(pid: int) -> bool:
    """Not ended, or not yet reaped by its parent."""
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_ends_with_its_rank_and_others_go_on(fleet: ProcessFleet, truth: Truth, role: str) -> None:
    streams = [ask(fleet, num_prompt=3000 if role == "prefill" else 200, seed=seed) for seed in (1, 2)]
    if role == "decode":
        for stream in streams:
            stream.wait_for_tokens(5)
    worker = find_busy(fleet, role)
    (rank,) = worker.find_ranks()
    os.kill(rank, signal.SIGKILL)
    assert worker.wait_exited(WAIT_S) == 1
    assert "a rank ended; its worker ends with it" in worker.read_log()
    for stream in streams:
        truth.check(stream)
    mend(fleet, truth)


def test_stopped_rank_is_noticed_by_the_age_of_its_step_and_comes_back(fleet: ProcessFleet, truth: Truth) -> None:
    stream = ask(fleet)
    stream.wait_for_tokens(5)
    worker = find_busy(fleet, "decode")
    (rank,) = worker.find_ranks()
    os.kill(rank, signal.SIGSTOP)
    truth.check(stream)
    assert not is_alive(fleet, worker)
    os.kill(rank, signal.SIGCONT)
    mend(fleet, truth)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_worker(fleet: ProcessFleet, truth: Truth, role: str, end: signal.Signals) -> None:
    """On a stop it drains first, although ranks receive a terminal's Ctrl-C too."""
    worker = fleet[f"{role}-0"]
    (rank,) = worker.find_ranks()
    with Load(fleet) as load:
        load.wait_for(4)
        if end is signal.SIGTERM:
            os.kill(rank, signal.SIGINT)
        worker.signal(end)
        assert worker.wait_exited(WAIT_S) == (0 if end is signal.SIGTERM else -signal.SIGKILL)
        wait_until(lambda: not is_there(rank))
    load.check(truth) if end is signal.SIGTERM else load.check_clean(truth)
    mend(fleet, truth)
