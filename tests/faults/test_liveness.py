"""Processes that stop for a minute or restart under load. Rows 5, 10, 12 and 26 of the fault list."""

import random
import time

import pytest

from tests.faults.conftest import Held
from tests.faults.load import Load
from tests.faults.soak import roll
from tests.support.fault_answers import Truth, ask, find, find_busy, is_alive, read_events
from tests.support.fleet import Process, ProcessFleet
from tests.support.live import HTTP, wait_until

pytestmark = pytest.mark.timeout(400)

STOPPED_S = 60.0
DEAD_S = 55.0  # gRPC's keepalive promises 20 s + 10 s; without its settings it takes 60 to 80 s
NOTICED_S = 30.0  # the promise: a heartbeat, 2 s here
DRAINED_S = 120.0
SLACK_S = 60.0  # for a loaded machine
CLIENT_S = 300.0  # for a client whose gateway is stopped for a minute


# Why attempts fail without being dropped by a worker: it drains, is gone, or is slow on a loaded machine.
def test_row_10_workers_stopped_for_a_minute_are_left_and_taken_back(quad: ProcessFleet, truth: Truth) -> None:
    """One of each kind at once, under load: clients see only a pause."""
    with Load(quad, pause_s=4.0) as load:  # a minute, on a machine that may be busy
        stopped = [find_busy(quad, "decode"), find_busy(quad, "prefill")]
        before = [find(quad, worker)["incarnation"] for worker in stopped]
        for worker in stopped:
            worker.stop()
        until = time.monotonic() + STOPPED_S
        wait_until(lambda: not any(is_alive(quad, worker) for worker in stopped), NOTICED_S)
        num_before = len(load.ended)
        while time.monotonic() < until:
            assert all(find(quad, worker)["trouble"] for worker in stopped), quad.status()
            wait_until(lambda: HTTP.get(f"{quad.url}/ready", timeout=30).status_code == 200, NOTICED_S)  # two serve
            time.sleep(1.0)
        num_meanwhile = len(load.ended) - num_before
        assert num_meanwhile > 0, "traffic moved to the others"
        for worker in stopped:
            worker.resume()
        seconds = quad.wait_until_whole()
        assert [find(quad, worker)["incarnation"] for worker in stopped] == before, "they are the same processes"
        truth.check_crowd(quad)
    load.check(truth)
    quad.wait_until_unused()
    longest = max(asking.longest_pause_s for asking in load.ended)
    print(
        f"row 10, {STOPPED_S:g} s: {num_meanwhile} answers meanwhile, longest pause of a client {longest:.1f} s, "
        f"both taken back {seconds:.2f} s after SIGCONT"
    )


def test_row_10_stopped_gateway_is_left_by_its_workers_and_goes_on(held: Held, truth: Truth) -> None:
    """Workers drop all it held; when it resumes, its clients' answers continue as if nothing had happened.

    The engines are held as well, so what it held cannot end by itself.
    """
    fleet = held.fleet
    decodes, prefill = [fleet["decode-0"], fleet["decode-1"]], fleet["prefill-0"]
    cancelled, left_before = prefill.metric("cancelled_total"), [len(_departures(worker)) for worker in decodes]
    streams = [ask(fleet, num_tokens=600, seed=seed, timeout_s=CLIENT_S) for seed in (1, 2)]
    leaver = ask(fleet, num_tokens=600, seed=3)
    for stream in (*streams, leaver):
        stream.wait_for_tokens(3)
    held.hold(prefill)
    streams.append(ask(fleet, num_prompt=3500, num_tokens=20, timeout_s=CLIENT_S))
    wait_until(lambda: prefill.metric("kv_cache_used_pages") > 0, SLACK_S)
    fleet.gateway.stop()
    held.hold(*decodes)
    begun = time.monotonic()
    leaver.cancel()
    num_held = sum(worker.metric("num_requests_running") for worker in decodes)
    assert num_held > 0
    for worker, before in zip(decodes, left_before, strict=True):
        _wait_for_departure(worker, before)
    wait_until(lambda: prefill.metric("cancelled_total") > cancelled, DEAD_S, lambda: "prefill still waits for it")
    left_s = time.monotonic() - begun
    num_left = sum(sum(_departures(worker)[before:]) for worker, before in zip(decodes, left_before, strict=True))
    assert num_left >= num_held
    held.release(*decodes, prefill)
    freed_s = fleet.wait_until_unused(SLACK_S)
    time.sleep(max(0.0, begun + STOPPED_S + 1 - time.monotonic()))  # past --client-timeout-s, which excludes the stop
    fleet.gateway.resume()
    for stream in streams:
        truth.check(stream)
    fleet.wait_until_whole()
    truth.check_crowd(fleet)
    fleet.wait_until_unused()
    wait_until(lambda: fleet.gateway.metric("num_requests_running") == 0, SLACK_S)
    print(
        f"row 10, gateway: left by its workers after {left_s:.1f} s, {num_left} sessions ended; "
        f"pages free {freed_s:.1f} s after engines were"
    )


def _wait_until_back(fleet: ProcessFleet, worker: Process, before: object) -> None:
    """As an incarnation other than `before`."""
    wait_until(lambda: is_alive(fleet, worker) and find(fleet, worker)["incarnation"] != before, SLACK_S)


def _wait_for_departure(decode: Process, before: int) -> None:
    """Wait for a gateway's departure, after `before` earlier ones."""
    wait_until(lambda: len(_departures(decode)) > before, DEAD_S, lambda: "a decode worker still waits for its gateway")


def _departures(decode: Process) -> list[int]:
    """The number of sessions that ended with each departed gateway, from its log."""
    return [int(line["sessions_ended"]) for line in read_events(decode.read_log(), "gateway left")]


def test_row_26_rolling_restarts_under_load_lose_nothing(quad: ProcessFleet, truth: Truth) -> None:
    """Each worker once, in any order; `make soak` does it for an hour."""
    order = quad.workers()
    random.Random(time.monotonic_ns()).shuffle(order)
    with Load(quad) as load:
        for worker in order:
            before = find(quad, worker)["incarnation"]
            roll(worker, DRAINED_S + SLACK_S)
            _wait_until_back(quad, worker, before)
    load.check(truth)
    quad.wait_until_unused()
    longest = max(asking.longest_pause_s for asking in load.ended)
    print(f"row 26: {len(load.ended)} answers over {len(order)} restarts, longest pause of a client {longest:.1f} s")
