"""Hand-off through NIXL while workers die and stop, over TCP, where the owner's process sends the data that is read."""

import time
from collections.abc import Iterator

import pytest

from tests.faults.load import Load
from tests.support.fault_answers import Truth, mend
from tests.support.fleet import ProcessFleet, run_fleet

FLAGS = ["--transport=nixl", "--require-transport", "--nixl-allow-tcp"]
STOP_S = 6.0  # longer than a lease


@pytest.fixture(scope="module")
def fleet() -> Iterator[ProcessFleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        flags = {"prefill": ["--transport=nixl"], "decode": FLAGS, "prefill-0": ["--tp=2"], "decode-1": ["--tp=2"]}
        with run_fleet(2, 2, flags) as running:
            yield running


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_workers_that_die_or_stop_in_mid_read_cost_no_answer(
    fleet: ProcessFleet, truth: Truth, role: str, what: str
) -> None:
    """32 streams, between workers of one rank and of two.

    UCX may abort an owner whose reader dies in mid-read; the owner then restarts like any dead worker.
    """
    before = fleet.count("decode", "kv_transfer_bytes_total", {"transport": "nixl:tcp"})
    with Load(fleet, num_clients=32) as load:
        load.wait_for(32)
        worker = fleet[f"{role}-0"]
        if what == "killed":
            worker.kill()
        else:
            worker.stop()
            time.sleep(STOP_S)
            worker.resume()
        load.wait_for(48)
    load.check_clean(truth)
    assert fleet.count("decode", "kv_transfer_bytes_total", {"transport": "nixl:tcp"}) > before or what == "killed"
    mend(fleet, truth)
