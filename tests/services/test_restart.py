"""Dead workers come back, stopped ones are noticed, and requests that outlast a drain move. Real processes."""

import signal
import subprocess
from collections.abc import Iterator

import grpc
import pytest

from cli.plan import plan_restart
from tests.support.combinations import combination
from tests.support.command_line import run
from tests.support.fault_answers import answers, ask_several
from tests.support.live import HTTP, WAIT_S, Live, serve, wait_until

NUM, NUM_TOKENS = 4, 100
SECRET = "known-to-all-of-the-fleet"


@pytest.mark.parametrize(
    ("code", "served_s", "streak", "expected"),
    [
        (-signal.SIGKILL, 100.0, 0, (0.5, 1)),
        (-signal.SIGSEGV, 0.0, 1, (1.0, 2)),
        (1, 0.0, 5, (16.0, 6)),
        (1, 0.0, 6, (30.0, 7)),
        (1, 0.0, 5000, (30.0, 5001)),
        (1, 4.9, 3, (4.0, 4)),
        (1, 5.0, 3, (0.5, 1)),
        (0, 5.0, 0, None),
        (-signal.SIGTERM, 5.0, 0, None),
        (-signal.SIGINT, 100.0, 4, None),
    ],
)
def test_when_a_worker_starts_again(code: int, served_s: float, streak: int, expected: object) -> None:
    assert plan_restart(code, served_s, streak) == expected


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """Two decode workers and one prefill worker; the drain is too short for long answers."""
    with serve(
        "demo", "--dtype=float32", "--decode-workers=2", "--threads=1", "--heartbeat-s=2", "--drain-s=1",
        env={"BATON_FLEET_SECRET": SECRET}, forks=True,
    ) as service:  # fmt: skip
        yield service


@pytest.fixture(scope="module")
def undisturbed(live: Live) -> list[list[int]]:
    return answers(ask_several(live, NUM, NUM_TOKENS))


@pytest.mark.parametrize("name", ["decode-0", combination("prefill-0")])
def test_a_killed_worker_starts_again_and_is_taken_back(live: Live, undisturbed: list[list[int]], name: str) -> None:
    before = live.find(name)
    asking = ask_several(live, NUM, NUM_TOKENS)
    live.send(name, signal.SIGKILL)
    live.wait_shown(f"{name} ended with signal SIGKILL; 2 workers are left; it starts again in 0.5 s")
    wait_until(lambda: live.find(name)["incarnation"] != before["incarnation"] and live.is_alive(name))
    after = live.find(name)
    assert after["address"] == before["address"] and after["pid"] != before["pid"]
    assert answers(asking) == undisturbed
    served = "prompt_tokens_total" if name == "prefill-0" else "generation_tokens_total"

    def works() -> bool:
        assert answers(ask_several(live, NUM, NUM_TOKENS)) == undisturbed
        return live.metric(name, served) > 0

    wait_until(works)


@pytest.mark.nightly
def test_stopped_workers_are_named_and_come_back(live: Live, undisturbed: list[list[int]]) -> None:
    names = ("decode-0", "decode-1", "prefill-0")
    pids = {name: live.find(name)["pid"] for name in names}
    asking = ask_several(live, NUM, NUM_TOKENS)
    for name in names[:2]:
        live.send(name, signal.SIGSTOP)
    wait_until(lambda: HTTP.get(f"{live.url}/ready", timeout=WAIT_S).status_code == 503)
    reason = HTTP.get(f"{live.url}/ready", timeout=WAIT_S).json()["error"]["message"]
    assert all(live.addresses[name] in reason for name in names[:2]), reason
    for name in names[:2]:
        live.send(name, signal.SIGCONT)
    wait_until(lambda: HTTP.get(f"{live.url}/ready", timeout=WAIT_S).status_code == 200)
    live.send("prefill-0", signal.SIGSTOP)
    wait_until(lambda: not live.is_alive("prefill-0"))
    assert "answer" in str(live.find("prefill-0")["trouble"]) or "silent" in str(live.find("prefill-0")["trouble"])
    assert live.complete().status_code == 200, "decode prefills by itself"
    live.send("prefill-0", signal.SIGCONT)
    wait_until(lambda: all(live.is_alive(name) for name in names))
    assert {name: live.find(name)["pid"] for name in names} == pids, "without a restart"
    assert answers(asking) == undisturbed
    assert answers(ask_several(live, NUM, NUM_TOKENS)) == undisturbed


@pytest.mark.nightly
def test_a_drain_that_is_too_short_moves_sessions(live: Live, undisturbed: list[list[int]]) -> None:
    stranger = drain(live, "decode-0", "another-secret-that-is-long-enough")
    asking = ask_several(live, NUM, 5 * NUM_TOKENS)  # longer than the command takes to start
    assert stranger.returncode == 1 and "set BATON_FLEET_SECRET" in stranger.stderr
    done = drain(live, "decode-0", SECRET)
    assert (done.returncode, done.stderr) == (0, "")
    assert "drains: " in done.stdout and done.stdout.endswith("has ended\n"), done.stdout
    live.wait_shown("decode-0 ended with exit status 0; 2 workers are left; it stays ended, as it was asked to")
    assert [answer[:NUM_TOKENS] for answer in answers(asking)] == undisturbed
    done = drain(live, "decode-0", SECRET)
    assert done.returncode == 1 and "does not answer" in done.stderr, done.stderr


def drain(live: Live, name: str, secret: str) -> subprocess.CompletedProcess[str]:
    return run("drain", live.addresses[name], f"--url={live.url}", BATON_FLEET_SECRET=secret)


def test_a_gateway_that_may_not_wait_ends_answers_with_an_error(live: Live) -> None:
    asking = ask_several(live, NUM, 3000)
    live.process.send_signal(signal.SIGTERM)
    for one in asking:
        assert one.finish().code is grpc.StatusCode.UNAVAILABLE
        assert "before the answer was complete" in one.detail
    assert live.process.wait(WAIT_S) == 0
