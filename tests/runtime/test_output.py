"""Logs and the screen of `baton serve` when writing fails: the work goes on and ends normally."""

import os
import subprocess
import sys

import pytest

WAIT_S = 120.0
LOGS = """
import os
import structlog
from runtime.logs import setup_logging

setup_logging("decode", "info")
log = structlog.get_logger()
log.warning("lost", reason="x")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("lost, too")
os.write(int(os.environ["ALIVE_FD"]), b"alive")
"""
TAP = """
import os, sys, threading
from runtime.logs import tap_native_stderr

def take(line):
    if line == "last":
        seen.set()
    return False

seen = threading.Event()
tap_native_stderr(take)
os.write(2, b"first\\n")
os.write(2, b"last\\n")
print("lost", file=sys.stderr, flush=True)
assert seen.wait(60)
os.write(int(os.environ["ALIVE_FD"]), b"alive")
"""
SCREEN = """
import os
from cli.screen import Screen
from runtime.events import Loading, Ready
from runtime.logs import setup_logging

setup_logging("serve", "info")
screen = Screen("model", needs_key=False)
screen.say("starting decode-0")
screen.loading("decode-0", Loading(1, 1))
screen.ready("decode-0", Ready("decode", "127.0.0.1:1", "", 1, "i"))
screen.log("decode-0", "a line")
screen.serving(Ready("gateway", "127.0.0.1:2", "", 2, "i"))
screen.fail("why")
os.write(int(os.environ["ALIVE_FD"]), b"alive")
"""


def open_unwritable(kind: str) -> int:
    """A file descriptor on a full disk, or one with no reader left."""
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("script", "kind"),
    [(LOGS, "full disk"), (LOGS, "reader gone"), (TAP, "reader gone"), (SCREEN, "full disk"), (SCREEN, "reader gone")],
    ids=["logs, full", "logs, gone", "tap, gone", "screen, full", "screen, gone"],
)
def test_work_goes_on_when_nothing_can_be_written(kind: str, script: str) -> None:
    """The script reports to ALIVE_FD that it reached its end."""
    end = open_unwritable(kind)
    reading, writing = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=end,
        stderr=end,
        pass_fds=(writing,),
        env={**os.environ, "ALIVE_FD": str(writing)},
        timeout=WAIT_S,
    )
    os.close(end)
    os.close(writing)
    with os.fdopen(reading) as alive:
        assert (done.returncode, alive.read()) == (0, "alive")


def test_a_library_finds_its_objects_gone_at_the_end() -> None:
    """Bindings by nanobind, as Triton's, print a line for each that is left."""
    code = (
        "from runtime.lifecycle import spare_what_is_here\n"
        "class Bound:\n    def __del__(self): print('gone')\n"
        "one = Bound()\none.me = one\nspare_what_is_here()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.stderr) == ("gone\n", "")


def test_a_log_that_can_be_written_is() -> None:
    command = [sys.executable, "-c", LOGS]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ALIVE_FD": "1"}, timeout=WAIT_S)
    assert done.stdout == "alive"
    first, second = done.stderr.splitlines()
    assert '"lost"' in first and "ZeroDivisionError" in second
