"""Packets lost between all processes and to their client. Row 11 of the fault list.

All processes run in a network namespace where the kernel drops random packets; the host's network is unchanged.
"""

import re
import shutil
import subprocess
import sys

import pytest

from demo.paths import TARGET_DIR
from tests.support.fault_answers import Truth, ask
from tests.support.fleet import run_fleet
from tests.support.oracle import Oracle

LOSS_PERCENT = 5
RULES = f"""
table inet lossy {{
    counter lost {{}}
    chain input {{
        type filter hook input priority 0;
        numgen random mod 100 < {LOSS_PERCENT} counter name lost drop
    }}
}}
"""
NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
MIN_LOST = 50
TIMEOUT_S = 400


def test_row_11_lost_packets_lose_no_tokens() -> None:
    _require_network()
    done = subprocess.run(
        [*NETWORK, sys.executable, "-m", "tests.faults.test_lost_packets"], capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


def _require_network() -> None:
    if missing := [tool for tool in ("unshare", "ip", "nft") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} (Debian: util-linux, iproute2, nftables)")
    tried = subprocess.run([*NETWORK, "nft", "--file", "-"], input=RULES, capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"this system gives no network namespace with packet loss: {tried.stderr.strip()[-300:]}")


def answer_in_lossy_network() -> None:
    """Mixed concurrent streams, KV by gRPC, each answered right despite lost packets. Raises AssertionError."""
    truth = Truth(Oracle(TARGET_DIR))
    with run_fleet(flags={"decode": ["--transport=grpc"]}) as fleet:
        subprocess.run(["nft", "--file", "-"], input=RULES, text=True, check=True, timeout=30)
        streams = [ask(fleet, num_prompt=20 + 60 * seed, num_tokens=60, seed=seed) for seed in range(12)]
        for stream in streams:
            truth.check(stream)
        fleet.wait_until_unused()
        moved = sum(worker.metric("kv_transfer_bytes_total", {"transport": "grpc"}) for worker in fleet.workers())
        assert moved > 0, "no KV went through the network"
    listed = subprocess.run(["nft", "list", "counters"], capture_output=True, text=True, check=True, timeout=30).stdout
    found = re.search(r"packets (\d+)", listed)
    assert found is not None and int(found[1]) >= MIN_LOST, f"too few packets were lost: {listed}"
    print(f"row 11: 12 streams right, {found[1]} packets lost, {moved:.0f} bytes of KV through them")


if __name__ == "__main__":
    answer_in_lossy_network()
