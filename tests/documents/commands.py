"""Runs the README's commands one after the other, as they are written: `python -m tests.documents.commands`.

Servers run until the next one starts, or the end. What needs a hub, PyPI, or a program that may be missing says so in
its comment and is not run. Port 8000 must be free: tests/services/test_readme.py gives it a network of its own.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MARKS = re.compile(r"#.*(?:\bhub\b|\bPyPI\b|\bneeds\b|runs the tests)|/path/to/")
SETTINGS = ("export ", "source ")  # of the shell that later commands run in
SERVICES = ("make serve", "baton serve")
SERVERS = (*SERVICES, "baton prefill", "baton decode", "baton gateway")
READY = "curl --silent --fail --max-time 5 http://127.0.0.1:8000/ready"
START_S, COMMAND_S, STOP_S = 300, 120, 60


class Command(NamedTuple):
    text: str
    is_marked: bool = False  # not to be run

    @property
    def is_server(self) -> bool:
        return self.text.startswith(SERVERS)


def read_commands(readme: str) -> Iterator[Command]:
    """Lines of blocks without a language, and Python blocks as programs."""
    for language, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", readme):
        if language == "python":
            yield Command(f"python - <<'END'\n{block}END")
        elif not language:
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                yield Command(line.partition("  # ")[0].strip(), bool(MARKS.search(line)))


def start(script: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(["bash", "-c", script], stdout=out, stderr=out, start_new_session=True)


def stop(servers: list[subprocess.Popen[bytes]]) -> None:
    def send(number: int) -> None:
        for server in servers:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(server.pid, number)

    send(signal.SIGINT)
    try:
        for server in servers:
            server.wait(STOP_S)
    finally:
        send(signal.SIGKILL)  # what is left
        servers.clear()


def run(commands: list[Command]) -> None:
    """Raises CalledProcessError or TimeoutExpired for a command, TimeoutError for a service that does not start."""
    servers: list[subprocess.Popen[bytes]] = []
    before = Command("")
    settings = "set -e\n"
    try:
        for command in commands:
            print(f"$ {command.text}", flush=True)
            script = settings + command.text
            if command.text.startswith(SETTINGS):
                settings = f"{script}\n"
                continue
            if command.is_server:
                if not before.is_server or command.text.startswith(SERVICES):
                    stop(servers)
                servers.append(start(script, Path(f"server-{len(servers)}.log")))
            else:
                if before.is_server:
                    wait_until_ready(servers)
                subprocess.run(["bash", "-c", script], check=True, timeout=COMMAND_S)
            before = command
        if before.is_server:
            wait_until_ready(servers)
    finally:
        stop(servers)


def wait_until_ready(servers: list[subprocess.Popen[bytes]]) -> None:
    """Until the gateway says so."""
    end = time.monotonic() + START_S
    while subprocess.run(READY.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        if time.monotonic() > end or any(server.poll() is not None for server in servers):
            raise TimeoutError("\n".join(log.read_text() for log in Path().glob("server-*.log")))
        time.sleep(0.1)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run([command for command in read_commands(Path("README.md").read_text()) if not command.is_marked])
