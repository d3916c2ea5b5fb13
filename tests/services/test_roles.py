"""Workers of both roles change them under load: answers are right, and what they have cached is still there."""

import itertools
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence

import grpc
import httpx
import pytest

from cli.role import role
from cli.service import CommandError
from protos import worker_pb2, worker_pb2_grpc
from tests.faults.chaos import Case, Tally, build_cases, keep_asking
from tests.support.fleet import Process, ProcessFleet, run_fleet
from tests.support.live import HTTP_S, wait_until

NUM_WORKERS, NUM_STREAMS, NUM_SWITCHES, MOST_ROUNDS = 3, 6, 6, 5
PAUSE_S = 1.0  # between two changes
ROLES = ("prefill", "decode")
SHAPES = [("prefill",), ("decode",), ROLES]
CALL_S, UNUSED_S = 10.0, 60.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[ProcessFleet]:
    with run_fleet(0, 0, num_both=NUM_WORKERS, forks=True, lease_s=10, patience_s=60) as running:
        yield running


def set_roles(worker: Process, roles: Sequence[str], caller: str = "a test") -> None:
    with grpc.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        stub.SetRoles(worker_pb2.SetRolesRequest(roles=roles, caller=caller), timeout=CALL_S)


def switch(fleet: ProcessFleet, count: int, pause_s: float, seed: int) -> int:
    """Changes the roles of random workers, so that each role has one. Returns how many changed."""
    dice, changed = random.Random(seed), 0
    now: dict[str, Sequence[str]] = dict.fromkeys((worker.name for worker in fleet.workers()), ROLES)
    for worker in fleet.workers():
        set_roles(worker, ROLES)
    while changed < count:
        worker, roles = dice.choice(fleet.workers()), dice.choice(SHAPES)
        others = set(itertools.chain.from_iterable(now[one] for one in now if one != worker.name))
        if roles != now[worker.name] and others | set(roles) == set(ROLES):
            set_roles(worker, roles)
            now[worker.name], changed = roles, changed + 1
            time.sleep(pause_s)
    return changed


def run_under_load(
    fleet: ProcessFleet, cases: "queue.SimpleQueue[Case]", num_switches: int, pause_s: float, seed: int
) -> Tally:
    """Streams one after the other, from start to end, while roles change."""
    tally, until = Tally(), time.monotonic() + num_switches * pause_s
    clients = [threading.Thread(target=keep_asking, args=(fleet, cases, tally, until)) for _ in range(NUM_STREAMS)]
    for client in clients:
        client.start()
    switch(fleet, num_switches, pause_s, seed)
    for client in clients:
        client.join(10 * UNUSED_S)
        assert not client.is_alive()
    return tally


def test_roles_change_under_load_and_answers_are_right(fleet: ProcessFleet) -> None:
    cases: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in build_cases(fleet, NUM_STREAMS, 3, (20, 100, 400), (20, 60)):
        cases.put(case)
    for seed in range(MOST_ROUNDS):  # a busy machine answers few requests between two changes
        tally = run_under_load(fleet, cases, NUM_SWITCHES, PAUSE_S, seed)
        assert set(tally.outcomes) == {"right"}, (tally.outcomes, tally.complaints)
        fleet.wait_until_unused(UNUSED_S)
        offered, answered = (
            {worker.name for worker in fleet.workers() if worker.metric(sample)}
            for sample in ("offers_sent_total", "generation_tokens_total")
        )
        if offered & answered and len(answered) > 1:
            break
    assert offered & answered and len(answered) > 1, f"prompts by {offered}, answers by {answered}"
    assert len({worker["incarnation"] for worker in fleet.status()}) == NUM_WORKERS


def test_what_is_cached_is_still_there_after_a_change(fleet: ProcessFleet) -> None:
    first, *others = fleet.workers()
    prompt = [7 + number % 250 for number in range(800)]

    def ask() -> int:
        """Returns how many tokens of the prompt were cached."""
        body = {"model": "baton-demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=HTTP_S).raise_for_status().json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    set_roles(first, ROLES)
    for worker in others:
        set_roles(worker, ["prefill"])
    wait_until(lambda: [one["alive"] for one in fleet.status() if one["role"] == "decode"].count(True) == 1)
    ask()
    for worker in others:
        set_roles(worker, ["decode"])
    set_roles(first, ["prefill"])  # what it has from its time as a decode worker is lent or handed over
    wait_until(lambda: [one["alive"] for one in fleet.status() if one["role"] == "decode"].count(True) == 2)
    before = first.metric("prompt_tokens_total")
    assert ask() >= 700
    assert first.metric("prompt_tokens_total") - before < 100


def test_a_closed_role_is_refused_and_named(fleet: ProcessFleet) -> None:
    worker, *others = fleet.workers()
    for one in others:
        set_roles(one, ROLES)
    set_roles(worker, ["prefill"])
    wait_until(lambda: any("takes prefill requests only" in one["trouble"] for one in fleet.status()))
    for roles, caller, code in (
        (["decode"], "another", grpc.StatusCode.FAILED_PRECONDITION),
        ([], "a test", grpc.StatusCode.INVALID_ARGUMENT),
        (["encode"], "a test", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            set_roles(worker, roles, caller)
        assert caught.value.code() is code, caught.value
    with pytest.raises(CommandError, match="a test set this worker's roles"):
        role(worker.address, "both", url=fleet.url)


def test_the_command_changes_roles_and_leaves_none_without_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    with run_fleet(0, 0, num_both=2, forks=True) as fleet:
        first, second = fleet.workers()
        assert role(first.address, "decode", url=fleet.url) == 0
        assert f"{first.address} takes decode requests; 0 of others go on" in capsys.readouterr().out
        wait_until(lambda: any("takes decode requests only" in one["trouble"] for one in fleet.status()))
        with pytest.raises(CommandError, match="no other worker takes prefill requests"):
            role(second.address, "decode", url=fleet.url)
