"""More requests than fit. Rows 1 (queue), 7 and 14 of the fault list."""

import grpc

from tests.support.fault_answers import Truth, ask, read_events
from tests.support.fleet import ProcessFleet
from tests.support.live import wait_until

QUEUE = 4
ROOM = 2 + QUEUE


def test_row_01_client_that_leaves_the_queue(small: ProcessFleet, truth: Truth) -> None:
    """It leaves while all places are taken, so it never reaches a worker."""
    decode = small["decode-0"]
    left = small.gateway.metric("cancelled_total", {"phase": "waiting"})
    running = [ask(small, num_tokens=3800, seed=seed) for seed in (1, 2)]
    for stream in running:
        stream.wait_for_tokens(1)
    waiting = ask(small, seed=3)
    wait_until(lambda: small.gateway.metric("num_requests_waiting") == 1)
    reserved = len(read_events(decode.read_log(), "session reserved"))
    waiting.cancel()
    seconds = wait_until(lambda: small.gateway.metric("num_requests_waiting") == 0)
    assert small.gateway.metric("cancelled_total", {"phase": "waiting"}) == left + 1
    assert decode.metric("num_requests_running") == 2 and not any(stream.is_over for stream in running)
    print(f"row 1, queue: left after {seconds * 1e3:.0f} ms")
    for stream in running:
        stream.cancel()
    small.wait_until_unused()
    assert len(read_events(decode.read_log(), "session reserved")) == reserved
    truth.check_canary(small)


def test_row_07_what_prefill_refuses_is_refused_to_the_client(small: ProcessFleet, truth: Truth) -> None:
    generated = small["decode-0"].metric("generation_tokens_total")
    stream = ask(small, num_prompt=2000, num_tokens=10).finish()
    assert stream.code is grpc.StatusCode.INVALID_ARGUMENT and "1024" in stream.detail, stream.detail
    assert not stream.tokens
    small.wait_until_unused()
    assert small["decode-0"].metric("generation_tokens_total") == generated
    truth.check_canary(small)


def test_row_14_overload_is_refused_quickly_and_harms_nobody(small: ProcessFleet, truth: Truth) -> None:
    accepted = [ask(small, num_prompt=100, num_tokens=2000, seed=seed) for seed in range(1, 3)]
    for stream in accepted:
        stream.wait_for_tokens(1)
    crowd = [ask(small, num_prompt=100, num_tokens=20, seed=seed % 3) for seed in range(10 * ROOM)]
    wait_until(lambda: sum(stream.is_over for stream in crowd) >= len(crowd) - QUEUE)
    assert not any(stream.is_over for stream in accepted), "refusals do not wait for running answers"
    for stream in crowd:
        truth.check_clean(stream)
    refused = [stream for stream in crowd if stream.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert len(refused) >= len(crowd) - 2 * ROOM and all(stream.retry_after_s > 0 for stream in refused)
    slowest = max(stream.seconds for stream in refused)
    median = sorted(stream.seconds for stream in refused)[len(refused) // 2]
    print(
        f"row 14: {len(refused)} of {len(crowd)} refused, median {median * 1e3:.0f} ms, slowest {slowest * 1e3:.0f} ms"
    )
    for stream in accepted:
        truth.check(stream)
