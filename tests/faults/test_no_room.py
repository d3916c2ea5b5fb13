"""Workers with too little memory for their requests. Row 7 of the fault list."""

from collections.abc import Iterator

import grpc
import pytest

from tests.support.fault_answers import Truth, ask
from tests.support.fleet import ProcessFleet, run_fleet

pytestmark = pytest.mark.timeout(300)

LITTLE_MIB = 4  # room for 576 tokens
CONTEXT = 560  # a worker needs room for one context to start
LITTLE = [f"--max-context-tokens={CONTEXT}"]


@pytest.fixture(scope="module")
def little_prefill() -> Iterator[ProcessFleet]:
    with run_fleet(flags={"prefill": LITTLE}, kv_memory_mib={"prefill": LITTLE_MIB}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def little_decode() -> Iterator[ProcessFleet]:
    flags = {"decode": [*LITTLE, "--tp=1"]}  # with more ranks than KV heads in the draft model, pages are larger
    with run_fleet(flags=flags, kv_memory_mib={"decode": LITTLE_MIB}) as fleet:
        yield fleet


def refuse(fleet: ProcessFleet, num_prompt: int, num_tokens: int) -> None:
    """A request that can never fit is refused by a named error, and nothing is generated for it."""
    generated = fleet["decode-0"].metric("generation_tokens_total")
    stream = ask(fleet, num_prompt, num_tokens).finish()
    assert stream.code is grpc.StatusCode.INVALID_ARGUMENT, f"{stream.code}: {stream.detail}"
    assert str(CONTEXT) in stream.detail and not stream.tokens
    fleet.wait_until_unused()
    assert fleet["decode-0"].metric("generation_tokens_total") == generated


def num_second_attempts(fleet: ProcessFleet) -> int:
    return fleet["decode-0"].read_log().count('"attempt": 2')


def test_row_07_prefill_without_room_lets_prompts_wait(little_prefill: ProcessFleet, truth: Truth) -> None:
    """One prompt fits; the others are refused, wait, and are answered whole: decode never runs on partial KV."""
    before = num_second_attempts(little_prefill)
    streams = [ask(little_prefill, num_prompt=500, num_tokens=20, seed=seed) for seed in range(6)]
    for stream in streams:
        truth.check(stream)
    assert num_second_attempts(little_prefill) > before, "none was refused: the test is too easy"
    little_prefill.wait_until_unused()


def test_row_07_prompt_that_never_fits_prefill_is_refused(little_prefill: ProcessFleet, truth: Truth) -> None:
    refuse(little_prefill, num_prompt=1000, num_tokens=5)
    truth.check_canary(little_prefill)


def test_row_07_decode_without_room_lets_requests_wait(little_decode: ProcessFleet, truth: Truth) -> None:
    """Both prompts fit, but no two answers: requests wait or are preempted, and are answered whole."""
    streams = [ask(little_decode, num_prompt=250, num_tokens=200, seed=seed) for seed in range(6)]
    for stream in streams:
        truth.check(stream)
    preempted = little_decode["decode-0"].metric("num_preemptions_total")
    assert preempted + num_second_attempts(little_decode) > 0, "none had to wait: the test is too easy"
    little_decode.wait_until_unused()


def test_row_07_request_that_never_fits_decode_is_refused(little_decode: ProcessFleet, truth: Truth) -> None:
    refuse(little_decode, num_prompt=300, num_tokens=600)
    truth.check_canary(little_decode)
