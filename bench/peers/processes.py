"""Starts and stops a server with all its processes."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Started:
    """A started server; it may not be ready, or may have ended."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float  # time.perf_counter()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def read_end(self, num_chars: int = 1500) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-num_chars:]

    def read_reason(self) -> str:
        """The last line with letters: the error of a traceback, or the text of a framed message."""
        lines = [line.strip("│ \t") for line in self.read_end().splitlines()]
        return next((line for line in reversed(lines) if any(map(str.isalpha, line))), "it wrote nothing")


def start(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Started:
    """Start in a new process group, so that all of it can be ended."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **variables}, start_new_session=True
        )
    with suppress(OSError):  # out of memory, a benchmark's server is killed first
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("900")
    return Started(process, log, time.perf_counter())


def stop(started: Started) -> None:
    """SIGTERM, then SIGKILL to the rest of its group; immediately if interrupted."""
    try:
        if not started.has_ended:
            started.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                started.process.wait(STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)  # the group id is its first process's id
        started.process.wait()


def read_available_bytes() -> int:
    """Memory available without ending anything."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
