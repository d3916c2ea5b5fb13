"""Engines that hang in a step, or are slow, while their processes answer as usual. Rows 1, 10, 29 and 30."""

import time
from pathlib import Path

from tests.faults.conftest import Held
from tests.support.fault_answers import Truth, ask, ask_status, failed_attempts, find
from tests.support.fleet import Process, run_fleet
from tests.support.live import HTTP, wait_until
from worker.chunks import CHUNK_S

CHUNK_TOKENS = 512  # prefill's maximum per step
PROMPT_TOKENS = 3500
NOTICED_S = 60.0  # the promise: --stall-s and a heartbeat, 7 s here
STUCK = "has been in one engine step for"
SLOW_S = 0.0125  # more for each token and each of two models: about 100 times as slow
SLOW_PROMPT = 2000


def test_row_01_prefill_hears_that_the_client_left_and_stops(held: Held, truth: Truth) -> None:
    """In mid-prompt; the prompt cannot end by itself, because its engine is held in the first step."""
    fleet = held.fleet
    prefill = fleet["prefill-0"]
    cancelled, computed = _cancelled(prefill, "prefill"), prefill.metric("prompt_tokens_total")
    receiving = fleet.count("decode", "cancelled_total", {"phase": "receiving"})
    held.hold(prefill)
    stream = ask(fleet, PROMPT_TOKENS, num_tokens=20)
    wait_until(lambda: prefill.metric("kv_cache_used_pages") > 0, NOTICED_S)
    stream.cancel()
    seconds = wait_until(lambda: _cancelled(prefill, "prefill") == cancelled + 1, NOTICED_S)
    wait_until(lambda: not fleet.count("decode", "kv_cache_used_pages"), NOTICED_S)
    assert fleet.count("decode", "cancelled_total", {"phase": "receiving"}) == receiving + 1
    held.release(prefill)
    fleet.wait_until_unused(NOTICED_S)
    assert prefill.metric("prompt_tokens_total") <= computed + CHUNK_TOKENS, "it went on after its step"
    print(f"row 1, prefill: heard after {seconds * 1e3:.0f} ms")
    truth.check_canary(fleet)


def _cancelled(worker: Process, phase: str) -> float:
    return worker.metric("cancelled_total", {"phase": phase})


def test_row_10_decode_worker_stuck_in_a_step_is_left(held: Held, truth: Truth) -> None:
    """Its answers continue elsewhere; if all hang, /ready reports it, and answers wait for the first to recover."""
    fleet = held.fleet
    workers = [fleet["decode-0"], fleet["decode-1"]]
    first = ask(fleet)
    first.wait_for_tokens(3)
    held.hold(*workers)  # at once, before the answer ends
    (stuck,) = [worker for worker in workers if worker.metric("kv_cache_used_pages")]
    (other,) = [worker for worker in workers if worker is not stuck]
    held.release(other)
    truth.check(first)
    assert STUCK in find(fleet, stuck)["trouble"], fleet.status()
    assert HTTP.get(f"{fleet.url}/ready", timeout=30).status_code == 200
    second = ask(fleet, seed=2)
    second.wait_for_tokens(3)
    held.hold(other)
    wait_until(lambda: HTTP.get(f"{fleet.url}/ready", timeout=30).status_code == 503, NOTICED_S)
    answer = HTTP.get(f"{fleet.url}/ready", timeout=30).text
    assert all(f"{worker.address} {STUCK}" in answer for worker in workers), answer
    assert not second.is_over
    held.release(*workers)
    truth.check(second)
    fleet.wait_until_whole()
    fleet.wait_until_unused()
    print(f"row 10, stuck decode: the client's longest pause was {first.longest_pause_s:.1f} s")


def test_row_10_prefill_worker_stuck_in_a_step_is_left(held: Held, truth: Truth) -> None:
    """Its runs are lost as soon as it is called stuck, before leases end, and decode computes the prompts itself."""
    fleet = held.fleet
    prefill = fleet["prefill-0"]
    expired = fleet.count("decode", "leases_expired_total")
    held.hold(prefill)
    stream = ask(fleet, PROMPT_TOKENS, num_tokens=20)
    truth.check(stream)
    assert fleet.count("decode", "leases_expired_total") == expired
    assert STUCK in find(fleet, prefill)["trouble"], fleet.status()
    truth.check_canary(fleet)
    held.release(prefill)
    fleet.wait_until_whole()
    truth.check_crowd(fleet)
    print(f"row 10, stuck prefill: answered after {stream.seconds:.1f} s")


def test_row_29_and_30_slow_workers_answer_slowly_and_one_that_hangs_is_left(held: Held, truth: Truth) -> None:
    """No step is long, no attempt is repeated; then the slow prefill worker hangs, and decode computes the prompt."""
    fleet = held.fleet
    prefill, decodes = fleet["prefill-0"], [fleet["decode-0"], fleet["decode-1"]]
    held.slow_down(SLOW_S, prefill, *decodes)
    prefill.restart()  # so that it has measured nothing
    fleet.wait_until_whole()
    num_failed, predicted = len(failed_attempts(fleet.gateway.read_log())), [0.0]
    stream = ask(fleet, SLOW_PROMPT, num_tokens=8)
    while not stream.is_over:
        predicted.append(ask_status(prefill).step_predicted_s)
        time.sleep(0.1)
    truth.check(stream)
    assert len(failed_attempts(fleet.gateway.read_log())) == num_failed, "begun again"
    num_steps = prefill.metric("engine_step_seconds_count")
    assert 0.1 < max(predicted) < 1.1 * CHUNK_S
    assert prefill.metric("engine_step_seconds_bucket", {"le": "5.0"}) == num_steps, "a long step"
    second = ask(fleet, SLOW_PROMPT, num_tokens=8, seed=2)
    wait_until(lambda: prefill.metric("engine_step_seconds_count") > num_steps + 1, NOTICED_S)
    held.hold(prefill)
    held.release(*decodes)
    seconds = wait_until(lambda: STUCK in find(fleet, prefill)["trouble"], NOTICED_S)
    assert "predicted to take" in find(fleet, prefill)["trouble"]
    truth.check(second)
    print(f"rows 29 and 30: {num_steps:.0f} steps in {stream.seconds:.0f} s; the hang was found after {seconds:.1f} s")


def test_row_30_a_worker_that_hangs_for_good_ends_itself(tmp_path: Path, truth: Truth) -> None:
    """With --exit-when-stuck; its answer goes on once it is started again."""
    file = tmp_path / "decode-0"
    flags = {"decode": ["--stall-s=1", "--exit-when-stuck=2"]}
    programs = {"decode-0": ("tests.faults.held_worker", str(file))}
    with run_fleet(0, 1, flags, patience_s=120.0, programs=programs) as fleet:
        decode, begun = fleet["decode-0"], time.monotonic()
        file.touch()
        stream = ask(fleet, num_tokens=20)
        assert decode.wait_exited(NOTICED_S) == 1
        print(f"row 30: it ended after {time.monotonic() - begun:.1f} s")
        assert "stuck: this process ends" in decode.read_log()
        file.unlink()
        decode.restart()
        truth.check(stream)
