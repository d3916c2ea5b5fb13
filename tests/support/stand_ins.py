"""A supervisor whose workers and gateway are stand-ins, for tests of `baton serve`.

    python -m tests.support.stand_ins supervise START_TIMEOUT_S STOP_S LOG_FORMAT
    python -m tests.support.stand_ins ROLE ... --ready-fd=FD      what it starts: uses the pipe like a worker

STAND_IN_<ROLE> selects a role's behaviour; the stand-ins write what happens into the file STAND_IN_NOTES.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn, cast

import msgspec

from cli.serve import supervise
from runtime.child import follow_parent
from runtime.config import ServeConfig
from runtime.config_parts import LogFormat
from runtime.events import ModelState, SetAwake, parse_event
from runtime.lifecycle import ReadyReporter

PROGRAM = (sys.executable, "-m", "tests.support.stand_ins")


def note(*words: object) -> None:
    with Path(os.environ["STAND_IN_NOTES"]).open("a") as notes:
        print(*words, file=notes)


def end(role: str) -> NoReturn:
    note("ended", role)
    sys.exit(0)


def stand_in(role: str, fd: int, mode: str) -> NoReturn:
    follow_parent(fd)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else lambda *_: end(role))
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
    note("pid", os.getpid(), *sys.argv[1:], os.environ.get("BATON_API_KEY"), os.environ.get("BATON_PORT"))
    reporter = ReadyReporter(fd, role)
    num_starts = Path(os.environ["STAND_IN_NOTES"]).read_text().count(f" {role} ")
    if num_starts > 1 and mode == "broken":
        os._exit(7)
    if num_starts == 2 and mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    reporter.loading(500_000, 1_000_000)
    if mode == "crash":
        crash()
    print(json.dumps({"event": "log of [x]", "level": "info", "role": role, "n": 1}), flush=True)
    if mode != "slow":
        reporter.loading(1_000_000, 1_000_000)
        os.write(fd, b"nonsense\n")
        print('{"event": "ready", "level": "info"}', flush=True)
        detail = {"device": "cpu", "no_hand_off": "cores are shared"}
        reporter.ready("127.0.0.1:90" + str(os.getpid())[-2:].zfill(2), "", "i", detail)
    if mode == "asks":
        ask_for_sleep(fd)
    while True:
        signal.pause()


def crash() -> NoReturn:
    note("pid", subprocess.Popen(["sleep", "600"]).pid)
    for number in range(50):
        print("crash line", number, flush=True)
    os._exit(7)


def ask_for_sleep(fd: int) -> None:
    """For its model to sleep, then to wake."""
    asked = socket.socket(fileno=os.dup(fd))
    for is_awake, ends in ((False, ("asleep",)), (True, ("awake", "failed"))):
        asked.sendall(msgspec.json.encode(SetAwake("baton-demo", is_awake)) + b"\n")
        for line in asked.makefile("rb", buffering=0):
            event = parse_event(line)
            assert isinstance(event, ModelState)
            note("state", event.state, len(event.prefill), len(event.decode), event.percent, event.reason)
            if event.state in ends:
                break


def main() -> None:
    role, *words = sys.argv[1:]
    if role != "supervise":
        stand_in(role, int(words[-1].removeprefix("--ready-fd=")), os.environ.get(f"STAND_IN_{role.upper()}", "ready"))
    start_timeout_s, stop_s, log_format = words
    config = ServeConfig(
        prefill_workers=2, decode_workers=1, api_key=("secret",), start_timeout_s=float(start_timeout_s),
        log_format=cast(LogFormat, log_format),
    )  # fmt: skip
    sys.exit(asyncio.run(supervise(config, PROGRAM, stop_s=float(stop_s))))


if __name__ == "__main__":
    main()
