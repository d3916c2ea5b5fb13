"""Processes that stop for a minute, drain or restart while others ask. Rows 10, 12, 13 and 26 of the list of faults."""

import random
import time
from typing import Any

import grpc
import httpx
import pytest

from bench.fleet import Process, ProcessFleet, wait_until
from bench.soak import roll
from tests.faults.answers import Truth, ask, find_busy, is_alive
from tests.faults.load import Load

pytestmark = pytest.mark.timeout(400)

STOPPED_S = 60.0
DEAD_S = 55.0  # the promise is gRPC's keepalive of 20 s and 10 s; without its settings it takes 60 to 80 s
NOTICED_S = 30.0  # the promise is a heartbeat, 1 s here
DRAINED_S = 120.0
SLACK_S = 60.0  # for a loaded machine


def find(fleet: ProcessFleet, process: Process) -> dict[str, Any]:
    """What the gateway's /status says of a worker."""
    return next(worker for worker in fleet.status() if worker["address"] == process.address)


def test_row_10_workers_stopped_for_a_minute_are_left_and_taken_back(quad: ProcessFleet, truth: Truth) -> None:
    """One of each kind at once, while others ask: nobody sees more of it than a pause."""
    with Load(quad) as load:
        stopped = [find_busy(quad, "decode"), find_busy(quad, "prefill")]
        before = [find(quad, worker)["incarnation"] for worker in stopped]
        for worker in stopped:
            worker.stop()
        until = time.monotonic() + STOPPED_S
        for worker in stopped:
            wait_until(lambda worker=worker: not is_alive(quad, worker), NOTICED_S)  # type: ignore[misc]
        num_before = len(load.ended)
        while time.monotonic() < until:
            assert all(find(quad, worker)["trouble"] for worker in stopped), quad.status()
            wait_until(lambda: httpx.get(f"{quad.url}/ready", timeout=30).status_code == 200, NOTICED_S)  # two serve
            time.sleep(1.0)
        num_meanwhile = len(load.ended) - num_before
        assert num_meanwhile > 0, "traffic moved to the others"
        for worker in stopped:
            worker.resume()
        seconds = quad.wait_until_whole()
        assert [find(quad, worker)["incarnation"] for worker in stopped] == before, "they are the same processes"
        for _ in range(4):  # every pair of workers meets
            truth.check_canary(quad)
    load.check(truth)
    quad.wait_until_unused()
    longest = max(asking.longest_pause_s for asking in load.ended)
    print(
        f"row 10, {STOPPED_S:g} s: {num_meanwhile} answers meanwhile, longest pause of a client {longest:.1f} s, "
        f"both taken back {seconds:.2f} s after SIGCONT"
    )


def test_row_10_stopped_gateway_is_left_by_its_workers_and_goes_on(quad: ProcessFleet, truth: Truth) -> None:
    """Workers let go of all it held; when it wakes up, its clients' answers go on as if nothing had been."""
    workers = quad.workers()
    left_before = {worker.name: worker.read_log().count("gateway left") for worker in workers}
    streams = [ask(quad, num_tokens=1500, seed=seed) for seed in (1, 2)]
    streams += [ask(quad, num_prompt=3500, num_tokens=30, seed=seed) for seed in (3, 4)]
    leaver = ask(quad, num_tokens=1500, seed=5)
    for stream in (*streams[:2], leaver):
        stream.wait_for_tokens(3)
    quad.gateway.stop()
    begun = time.monotonic()
    leaver.cancel()
    for worker in workers:
        if worker.role == "decode":
            wait_until(
                lambda worker=worker: worker.read_log().count("gateway left") > left_before[worker.name],  # type: ignore[misc]
                DEAD_S,
                lambda: "a decode worker still waits for its gateway",
            )
    left_s = time.monotonic() - begun
    freed_s = quad.wait_until_unused(SLACK_S)
    time.sleep(max(0.0, begun + STOPPED_S + 1 - time.monotonic()))  # past --client-timeout-s: nobody is blamed for it
    quad.gateway.resume()
    for stream in streams:
        truth.check_clean(stream)
    quad.wait_until_whole()
    for _ in range(4):
        truth.check_canary(quad)
    quad.wait_until_unused()
    wait_until(lambda: quad.gateway.metric("num_requests_running") == 0, SLACK_S)
    whole = sum(stream.code is None for stream in streams)
    print(
        f"row 10, gateway: left by decode after {left_s:.1f} s, pages free {freed_s:.1f} s later; "
        f"{whole} of {len(streams)} answers went on to their end"
    )


def test_row_12_new_gateway_serves_at_once(quad: ProcessFleet, truth: Truth) -> None:
    """Killed under load, with requests in every phase; the next one does not wait for what the old one held."""
    orphans = [ask(quad, num_tokens=3000, seed=1), ask(quad, num_prompt=3500, num_tokens=100, seed=2)]
    orphans[0].wait_for_tokens(3)
    quad.gateway.restart()
    truth.check_canary(quad)
    quad.wait_until_whole()
    with Load(quad) as load:
        wait_until(lambda: len(load.ended) >= 4, 2 * SLACK_S)
    load.check(truth)
    for orphan in orphans:
        assert orphan.finish().code is grpc.StatusCode.UNAVAILABLE
    quad.wait_until_unused()


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_row_13_worker_told_to_stop_under_load_finishes_and_is_replaced(
    quad: ProcessFleet, truth: Truth, name: str
) -> None:
    victim = quad[name]
    with Load(quad, num_clients=6) as load:
        wait_until(lambda: victim.metric("kv_cache_used_pages") > 0, SLACK_S)
        victim.terminate()
        assert victim.wait_exited(DRAINED_S + SLACK_S) == 0
        num_before = len(load.ended)
        wait_until(lambda: len(load.ended) >= num_before + 6, 2 * SLACK_S)
        assert not is_alive(quad, victim)
    load.check(truth)
    log = victim.read_log()
    assert '"event": "drained"' in log and "not all work could be finished" not in log
    quad.wait_until_unused()


def test_row_13_gateway_told_to_stop_under_load_finishes_answers_and_refuses_requests(
    quad: ProcessFleet, truth: Truth
) -> None:
    streams = [ask(quad, num_tokens=1500, seed=seed) for seed in (1, 2)]
    streams += [ask(quad, num_prompt=3500, num_tokens=100, seed=seed) for seed in (3, 4)]
    for stream in streams[:2]:
        stream.wait_for_tokens(3)
    quad.gateway.terminate()
    wait_until(lambda: '"event": "draining"' in quad.gateway.read_log(), SLACK_S)
    refused = ask(quad, num_tokens=5, seed=7).finish()
    assert refused.code is grpc.StatusCode.UNAVAILABLE and not refused.tokens
    for stream in streams:
        truth.check(stream)
    assert quad.gateway.wait_exited(DRAINED_S + SLACK_S) == 0
    assert "not all work could be finished" not in quad.gateway.read_log()
    assert not any(quad.used_pages().values())
    quad.gateway.restart()
    truth.check_canary(quad)


def test_row_26_rolling_restarts_under_load_lose_nothing(quad: ProcessFleet, truth: Truth) -> None:
    """Each worker once, in any order; the hour is `make soak`."""
    order = quad.workers()
    random.Random(time.monotonic_ns()).shuffle(order)
    with Load(quad) as load:
        for worker in order:
            before = find(quad, worker)["incarnation"]
            roll(worker, DRAINED_S + SLACK_S)
            wait_until(
                lambda worker=worker, before=before: (  # type: ignore[misc]
                    is_alive(quad, worker) and find(quad, worker)["incarnation"] != before
                ),
                SLACK_S,
            )
    load.check(truth)
    quad.wait_until_unused()
    longest = max(asking.longest_pause_s for asking in load.ended)
    print(f"row 26: {len(load.ended)} answers over {len(order)} restarts, longest pause of a client {longest:.1f} s")
