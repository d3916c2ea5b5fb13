"""Ten times the requests and KV that fit. Rows 1 (queue) and 14 of the fault list.

Times are compared within one run, with generous factors: other programs may take the machine's cores at any time.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import grpc
import httpx
import pytest

from tests.faults.soak import look_at
from tests.support.fault_answers import Truth, ask, prompt_of, read_events
from tests.support.fleet import Process, ProcessFleet, run_fleet
from tests.support.live import wait_until

pytestmark = pytest.mark.timeout(900)  # starting three processes takes minutes on a loaded machine

RUNNING, QUEUE = 2, 4
CROWD_PAUSE_S = 0.01  # between refused requests; an accepted one takes seconds
NUM_TOKENS = 400
ROUNDS = 3
SLOWER = 8.0  # accepted requests' times beside the crowd, against without it
SLOWER_THAN_LIVE = 40.0  # a refusal's time, against GET /live
FLAT_BYTES = 48 << 20
KV_STREAMS, KV_PROMPT, KV_TOKENS = 45, 2000, 400  # 108,000 tokens; 10,900 fit
CALL_S = 300.0


@pytest.fixture(scope="module")
def narrow() -> Iterator[ProcessFleet]:
    """A pair with room for only a few requests."""
    with run_fleet(flags={"gateway": [f"--max-queue={QUEUE}"], "decode": [f"--max-running={RUNNING}"]}) as fleet:
        yield fleet


@dataclass
class Crowd:
    """Requests that do not fit, sent one after the other without end."""

    fleet: ProcessFleet
    refused_s: list[float] = field(default_factory=list)  # time of each refusal
    live_s: list[float] = field(default_factory=list)  # time of GET /live beside it
    retry_after_s: set[int] = field(default_factory=set)
    answers: Counter[int] = field(default_factory=Counter)  # HTTP status |-> count

    @contextmanager
    def press(self) -> Iterator[None]:
        is_over = threading.Event()
        thread = threading.Thread(target=self._run, args=(is_over,), name="crowd", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(CALL_S)

    def _run(self, is_over: threading.Event) -> None:
        body = {"model": "baton-demo", "prompt": prompt_of(100), "max_tokens": 1}
        with httpx.Client(base_url=self.fleet.url, timeout=CALL_S) as client:
            while not is_over.wait(CROWD_PAUSE_S):
                begun = time.perf_counter()
                answer = client.post("/v1/completions", json=body)
                seconds = time.perf_counter() - begun
                self.answers[answer.status_code] += 1
                if answer.status_code == 429:
                    self.refused_s.append(seconds)
                    self.retry_after_s.add(int(answer.headers["retry-after"]))
                begun = time.perf_counter()
                client.get("/live")
                self.live_s.append(time.perf_counter() - begun)


def _run_full(fleet: ProcessFleet, truth: Truth, crowd: Crowd | None) -> float:
    """The slowest of as many answers as may run, with a full queue; with or without the crowd."""
    streams = [ask(fleet, 100, NUM_TOKENS, seed) for seed in range(1, RUNNING + 1)]
    for stream in streams:
        stream.wait_for_tokens(1)
    waiting = [ask(fleet, 20, num_tokens=3000, seed=9) for _ in range(QUEUE)] if crowd else []
    with crowd.press() if crowd else nullcontext():
        for stream in streams:
            truth.check(stream)
        for one in waiting:  # the crowd is still there and may queue behind them
            one.cancel()
            one.finish()
    fleet.wait_until_unused()
    return max(stream.seconds for stream in streams)


def test_row_14_ten_times_the_requests(narrow: ProcessFleet, truth: Truth) -> None:
    """Excess requests are refused soon, and accepted ones do not slow down."""
    crowd = Crowd(narrow)
    _run_full(narrow, truth, crowd)  # warms up
    crowd = Crowd(narrow)
    before = {name: look_at(process).private_bytes for name, process in narrow.processes.items()}
    alone, crowded = list[float](), list[float]()
    for _ in range(ROUNDS):
        alone.append(_run_full(narrow, truth, None))
        crowded.append(_run_full(narrow, truth, crowd))
    growth = {name: look_at(process).private_bytes - before[name] for name, process in narrow.processes.items()}
    refused, live = statistics.median(crowd.refused_s), statistics.median(crowd.live_s)
    print(
        f"row 14: {dict(crowd.answers)}; medians: a refusal {refused * 1e3:.1f} ms, GET /live {live * 1e3:.1f} ms; "
        f"slowest answers, s: alone {[round(one, 2) for one in alone]}, "
        f"crowded {[round(one, 2) for one in crowded]}; "
        f"private memory, MiB: { {name: round(size / 2**20, 1) for name, size in growth.items()} }"
    )
    assert set(crowd.answers) <= {429, 200} and crowd.answers[429] >= 10 * (RUNNING + QUEUE)
    assert min(crowd.retry_after_s) >= 1
    assert refused < SLOWER_THAN_LIVE * live
    assert min(crowded) < SLOWER * max(alone)
    assert all(size < FLAT_BYTES for size in growth.values()), growth


def test_row_01_and_14_what_waits_may_leave_and_what_is_refused_is_told_when_to_try_again(
    narrow: ProcessFleet, truth: Truth
) -> None:
    """A client that leaves while all places are taken never reaches a worker."""
    gateway, decode = narrow.gateway, narrow["decode-0"]
    running = [ask(narrow, num_tokens=3800, seed=seed) for seed in range(RUNNING)]
    for stream in running:
        stream.wait_for_tokens(1)
    left, reserved = gateway.metric("cancelled_total", {"phase": "waiting"}), _num_reserved(decode)
    waiting = [ask(narrow, num_tokens=100) for _ in range(QUEUE)]
    wait_until(lambda: gateway.metric("num_requests_waiting") == QUEUE)
    for _ in range(10):
        refused = ask(narrow, num_tokens=10).finish()
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED and refused.retry_after_s >= 1, refused.detail
        assert "--max-queue" in refused.detail
    for one in waiting:
        one.cancel()
    seconds = wait_until(lambda: gateway.metric("num_requests_waiting") == 0)
    print(f"row 1, queue: left after {seconds * 1e3:.0f} ms")
    assert gateway.metric("cancelled_total", {"phase": "waiting"}) == left + QUEUE
    assert decode.metric("num_requests_running") == RUNNING and not any(stream.is_over for stream in running)
    for stream in running:
        stream.cancel()
    narrow.wait_until_unused()
    assert _num_reserved(decode) == reserved
    truth.check_canary(narrow)


def _num_reserved(decode: Process) -> int:
    return len(read_events(decode.read_log(), "session reserved"))


def test_row_14_ten_times_the_kv(truth: Truth) -> None:
    """Accepted requests share the pages until each answer is whole; others are refused; memory does not grow."""
    with run_fleet(flags={"gateway": ["--max-queue=4"], "prefill": ["--max-running=4"]}) as fleet:
        truth.check(ask(fleet, KV_PROMPT, KV_TOKENS))
        growth: list[dict[str, int]] = []
        for _ in range(2):  # in the first round all buffers reach their size
            before = {name: look_at(process).private_bytes for name, process in fleet.processes.items()}
            streams = [ask(fleet, KV_PROMPT, KV_TOKENS, seed=1 + number % 2) for number in range(KV_STREAMS)]
            for stream in streams:
                truth.check_clean(stream)
            answered = sum(stream.code is None for stream in streams)
            refused = [stream for stream in streams if stream.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
            assert answered and len(refused) == len(streams) - answered
            assert all(stream.retry_after_s >= 1 for stream in refused)
            fleet.wait_until_unused()
            sizes = {name: look_at(process).private_bytes for name, process in fleet.processes.items()}
            growth.append({name: size - before[name] for name, size in sizes.items()})
        preempted = fleet["decode-0"].metric("num_preemptions_total")
        print(f"row 14, KV: {answered} of {len(streams)} answered, {preempted:.0f} preemptions, growth {growth}")
        assert all(size < FLAT_BYTES for size in growth[-1].values()), growth
        truth.check_canary(fleet)
