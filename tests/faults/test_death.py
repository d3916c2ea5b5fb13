"""Workers and gateways that are killed and come back. Rows 3, 4 and 12 of the fault list."""

import json

import grpc
import pytest

from tests.support.fault_answers import Truth, ask, find_busy, prompt_of
from tests.support.fleet import ProcessFleet
from tests.support.live import HTTP, WAIT_S

ORPHAN_TOKENS = 3000  # 9 s of work


def test_row_03_with_no_decode_worker_left_the_stream_ends_with_an_error(quad: ProcessFleet, truth: Truth) -> None:
    stream = ask(quad, num_tokens=3000)
    body = {"prompt": prompt_of(50), "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with HTTP.stream(
        "POST", f"{quad.url}/v1/completions", json={**body, "model": _model(quad)}, timeout=WAIT_S
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        stream.wait_for_tokens(5)
        quad["decode-0"].kill()
        quad["decode-1"].kill()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    stream.finish()
    assert stream.code is grpc.StatusCode.UNAVAILABLE and "no decode worker is alive" in stream.detail
    assert stream.tokens == truth.oracle.answer(stream.prompt, len(stream.tokens), guess=stream.tokens)
    errors = [json.loads(event)["error"] for event in events if event.startswith('{"error"')]
    assert len(errors) == 1 and "no decode worker is alive" in errors[0]["message"]


def _model(fleet: ProcessFleet) -> str:
    return str(HTTP.get(f"{fleet.url}/v1/models", timeout=WAIT_S).json()["data"][0]["id"])


@pytest.mark.parametrize("num_left", [1, 0])
def test_row_04_killed_prefill_worker_is_replaced(quad: ProcessFleet, truth: Truth, num_left: int) -> None:
    """By another prefill worker, or by the decode worker itself."""
    stream = ask(quad, num_prompt=3500, num_tokens=20)
    busy = find_busy(quad, "prefill")
    busy.kill()
    if not num_left:
        for worker in ("prefill-0", "prefill-1"):
            quad[worker].kill()
    truth.check(stream)
    if not num_left:
        truth.check_canary(quad)


def test_row_12_killed_gateway_leaves_nothing_behind(quad: ProcessFleet, truth: Truth) -> None:
    """Running answers and prompts are dropped, not finished."""
    generated = quad.count("decode", "generation_tokens_total")
    cancelled = quad.count("prefill", "cancelled_total", {"phase": "prefill"})
    streams = [ask(quad, num_tokens=ORPHAN_TOKENS)]
    streams[0].wait_for_tokens(3)
    streams += [ask(quad, num_prompt=3500, num_tokens=20, seed=seed) for seed in range(1, 7)]
    find_busy(quad, "prefill")
    quad.gateway.kill()
    freed_s = quad.wait_until_unused()
    more = quad.count("decode", "generation_tokens_total") - generated
    dropped = quad.count("prefill", "cancelled_total", {"phase": "prefill"}) - cancelled
    print(
        f"row 12: pages free {freed_s:.2f} s after the gateway was killed; "
        f"{more:.0f} of {ORPHAN_TOKENS} tokens, {dropped:.0f} of 6 prompts dropped"
    )
    assert more < ORPHAN_TOKENS and dropped > 0
    for stream in streams:
        assert stream.finish().code is grpc.StatusCode.UNAVAILABLE
    quad.gateway.restart()
    quad.wait_until_whole()
    truth.check_canary(quad)
