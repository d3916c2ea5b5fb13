"""Steps that really run out of memory: the kernel refuses the worker more. Row 25 of the fault list.

A step of one token allocates almost nothing, so that case is tested with a runner that raises
(tests/prefill_worker/test_kv_sender.py).
"""

import resource
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.fault_answers import Truth, ask
from tests.support.fleet import Process, ProcessFleet, run_fleet

pytestmark = pytest.mark.timeout(900)  # starting three processes takes minutes on a loaded machine

HEADROOM_MIB = 24  # for short prompts and gRPC's new threads, whose stacks count 8 MiB each
# The long prompt needs more: 10 MiB for each of the MLP's tensors [3500, 768], 3.4 MiB for each [3500, 256].
LONG = 3500
WHOLE_PROMPT_FLAGS = {"prefill": ["--chunk-tokens=4096"], "decode": ["--local-prefill-chunk-tokens=4096", "--tp=1"]}
PREFILL_ADVICE = "out of memory in an engine step: lower --chunk-tokens (now 4096)"
DECODE_ADVICE = "out of memory in an engine step: lower --local-prefill-chunk-tokens (now 4096)"


@pytest.fixture
def pair() -> Iterator[ProcessFleet]:
    """A pair that would compute a prompt in one step, but has not done so yet: malloc keeps memory it once got."""
    with run_fleet(flags=WHOLE_PROMPT_FLAGS) as fleet:
        yield fleet


def test_row_25_prefill_without_memory_is_done_without(pair: ProcessFleet, truth: Truth) -> None:
    truth.check_canary(pair)
    _starve(pair["prefill-0"])
    long = ask(pair, LONG, num_tokens=20)
    truth.check(long)
    assert PREFILL_ADVICE in pair["prefill-0"].read_log()
    _check_recovery(pair, truth)


def test_row_25_request_for_which_nobody_has_memory_is_told_what_to_change(pair: ProcessFleet, truth: Truth) -> None:
    truth.check_canary(pair)
    for worker in pair.workers():
        _starve(worker)
    long = ask(pair, LONG, num_tokens=20).finish()
    assert long.code is grpc.StatusCode.UNAVAILABLE, long.detail
    assert PREFILL_ADVICE in long.detail or DECODE_ADVICE in long.detail, long.detail
    assert long.retry_after_s > 0 and not long.tokens
    for name, advice in (("prefill-0", PREFILL_ADVICE), ("decode-0", DECODE_ADVICE)):
        lines = [line for line in pair[name].read_log().splitlines() if "step not computed" in line]
        assert lines and all(advice in line and "Traceback" not in line for line in lines), lines
    _check_recovery(pair, truth)


def _check_recovery(fleet: ProcessFleet, truth: Truth) -> None:
    """Short prompts are served at once, the long one as soon as there is memory."""
    truth.check_canary(fleet)
    for worker in fleet.workers():
        resource.prlimit(worker.pid, resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    fleet.wait_until_unused()  # not earlier: each metrics request takes a thread
    again = ask(fleet, LONG, num_tokens=20)
    truth.check(again)
    assert all(worker.num_starts == 1 and worker.is_running for worker in fleet.workers())


def _starve(worker: Process) -> None:
    """Limit the worker to HEADROOM_MIB more; further allocations fail."""
    lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    taken_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    limit = (taken_kib << 10) + (HEADROOM_MIB << 20)
    resource.prlimit(worker.pid, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
