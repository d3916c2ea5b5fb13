"""Machines short of files, disk or shared memory. Row 24 of the fault list.

All processes start through a wrapper that takes a resource away.
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from tests.support.fault_answers import Truth, ask
from tests.support.fleet import HOST, ProcessFleet, run_fleet
from tests.support.live import HTTP, wait_until
from wire.private_folders import IS_PRIVATE

pytestmark = pytest.mark.timeout(900)  # starting three processes takes minutes on a loaded machine

IS_ROOT = os.geteuid() == 0
UNSHARE = "unshare -m" if IS_ROOT else "unshare -rm"  # users other than root need a user namespace, too
CAN_MOUNT = (
    shutil.which("unshare")
    and not subprocess.run([*UNSHARE.split(), "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode
)
needs_mounts = pytest.mark.skipif(not CAN_MOUNT, reason="this user may not mount, not even in a namespace of its own")
HIDEABLE = ("/tmp", "/var/tmp")  # of temporary files, unless a test hides them
NUM_IDLE = 200


@contextmanager
def _run_wrapped(
    folder: Path, setup: str, wrapper: Sequence[str] = (), flags: Mapping[str, Sequence[str]] | None = None
) -> Iterator[ProcessFleet]:
    """A pair whose processes run the shell commands `setup`, then themselves under `wrapper`."""
    script = folder / "python"
    start = shlex.join([*wrapper, sys.executable])
    script.write_text(f'#!/bin/sh\nset -e\n{setup}\nexec {start} "$@"\n')
    script.chmod(0o755)
    with run_fleet(flags=flags, python=script) as fleet:
        yield fleet


@contextmanager
def _run_mounted(folder: Path, mounts: str) -> Iterator[ProcessFleet]:
    """The same, where each process sees its own `mounts` and looks for its caches in `folder`."""
    inner = folder / "mounted"
    inner.write_text(f'#!/bin/sh\nset -e\n{mounts}\nexec "$@"\n')
    inner.chmod(0o755)
    for name in ("cache", "tmp"):
        (folder / name).mkdir()
    setup = f"export XDG_CACHE_HOME={folder / 'cache'} TMPDIR={folder / 'tmp'}"
    if not IS_ROOT:  # root's folders seem to be another user's in a user namespace
        setup += f" {IS_PRIVATE}=1"
    with _run_wrapped(folder, setup, [*UNSHARE.split(), str(inner)]) as fleet:
        yield fleet


def _warnings(fleet: ProcessFleet, event: str) -> dict[str, list[str]]:
    """process |-> its log lines with `event`."""
    logs = {process.name: process.read_log().splitlines() for process in fleet.processes.values()}
    return {name: [line for line in lines if f'"event": "{event}"' in line] for name, lines in logs.items()}


def test_row_24_64_file_descriptors(tmp_path: Path, truth: Truth) -> None:
    """Logged once at start; excess connections wait or are closed, and afterwards all is as before."""
    with _run_wrapped(tmp_path, "", ["prlimit", "--nofile=64:64"]) as fleet:
        for name, lines in _warnings(fleet, "few open files allowed").items():
            assert len(lines) == 1 and '"limit": 64' in lines[0] and "ulimit -n" in lines[0], (name, lines)
        truth.check_canary(fleet)
        for process in fleet.processes.values():
            with ExitStack() as stack:
                for _ in range(NUM_IDLE):
                    stack.enter_context(socket.create_connection((HOST, process.port), timeout=30))
            assert process.is_running
        wait_until(lambda: _takes_calls(fleet))
        fleet.wait_until_whole()
        _check_canary_soon(fleet, truth)
        for process in fleet.processes.values():
            log = process.read_log()
            assert len(log) < 1 << 20, f"{process.name} flooded its log with {len(log)} bytes"
            print(f"row 24, {process.name}: {len(log)} bytes of log")


def _takes_calls(fleet: ProcessFleet) -> bool:
    """The gateway has noticed that clients are gone."""
    try:
        return HTTP.get(f"{fleet.url}/live").status_code == 200
    except httpx.TransportError:
        return False


def _check_canary_soon(fleet: ProcessFleet, truth: Truth) -> None:
    """Once the gateway can accept connections again."""
    wait_until(lambda: ask(fleet, 20, num_tokens=2).finish().code is not grpc.StatusCode.UNAVAILABLE)
    truth.check_canary(fleet)


def test_row_24_no_memory_for_a_shared_pool(tmp_path: Path, truth: Truth) -> None:
    """Files may have 1 MiB, and so may a pool's memory file: the pool is then private and read over gRPC.

    Several ranks need a shared pool, and report that there is none.
    """
    limit = ["prlimit", f"--fsize={1 << 20}"]
    refusal = r"ranks cannot share their pages: .*File too large; allow memfd_create of that size, or set --tp 1"
    with (
        pytest.raises(AssertionError, match=refusal),
        _run_wrapped(tmp_path, "", limit, {"prefill": ["--tp=2"]}),
    ):
        pass
    with _run_wrapped(tmp_path, "", limit, {"decode": ["--tp=1"]}) as fleet:
        said = _warnings(fleet, "pages go over gRPC even on this host")
        for name in ("prefill-0", "decode-0"):
            assert len(said[name]) == 1, said
            assert "File too large" in said[name][0] and "64 MiB" in said[name][0], said
        truth.check_canary(fleet)
        assert fleet["decode-0"].metric("kv_transfer_bytes_total", {"transport": "grpc"}) > 0


@needs_mounts
def test_row_24_no_shared_memory_folder(tmp_path: Path, truth: Truth) -> None:
    """Baton uses memory files, which do not need /dev/shm."""
    with _run_mounted(tmp_path, "mount -t tmpfs -o ro,size=4k tmpfs /dev/shm") as fleet:
        truth.check_canary(fleet)
        if IS_ROOT:  # otherwise the workers may not read each other's memory
            assert fleet["decode-0"].metric("kv_transfer_bytes_total", {"transport": "shm"}) > 0


@needs_mounts
@pytest.mark.skipif(
    any(Path(place).is_relative_to(folder) for place in (sys.prefix, Path.cwd()) for folder in HIDEABLE),
    reason=f"Baton itself lies in one of {HIDEABLE}, which this test takes away",
)
@pytest.mark.parametrize(
    ("options", "complaint"), [("size=16k", "No space left"), ("ro,size=4k", "No usable temporary directory")]
)
def test_row_24_nowhere_to_build_the_kernel(tmp_path: Path, truth: Truth, options: str, complaint: str) -> None:
    """Disk full, or all folders read-only: the slow kernel serves, and one log line gives the reason and the remedy."""
    folders = " ".join([*(str(tmp_path / name) for name in ("cache", "tmp")), *HIDEABLE])
    everywhere = f"for it in {folders}; do mount -t tmpfs -o {options} tmpfs $it; done"
    hidden = f"{everywhere}\ncd {HIDEABLE[0]}"  # the last resort for temporary files is the current folder
    with _run_mounted(tmp_path, hidden) as fleet:
        said = _warnings(fleet, "slow attention")
        for name in ("prefill-0", "decode-0"):
            assert len(said[name]) == 1 and complaint in said[name][0] and "XDG_CACHE_HOME" in said[name][0], said
        truth.check_canary(fleet)


@needs_mounts
@pytest.mark.parametrize(("options", "num_warnings"), [("ro,size=4k", 0), ("size=16k", 1)])
def test_row_24_cache_of_no_use(tmp_path: Path, truth: Truth, options: str, num_warnings: int) -> None:
    """Read-only or full: another folder is used, for a full one with a warning."""
    with _run_mounted(tmp_path, f"mount -t tmpfs -o {options} tmpfs {tmp_path / 'cache'}") as fleet:
        assert not any(_warnings(fleet, "slow attention").values())
        said = _warnings(fleet, "the cache folder is full")
        assert all(len(said[name]) == num_warnings for name in ("prefill-0", "decode-0")), said
        assert list((tmp_path / "tmp").rglob("cpu_paged-*.so"))
        truth.check_canary(fleet)
